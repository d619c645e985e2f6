"""Ollama's API: chat, generate, embeddings, and the descriptions of models.

``types`` has the JSON shapes, ``request`` translates their fields for the engine, ``answer`` has answers,
lines of streams and errors, and ``generation``, ``embedding`` and ``models`` the endpoints.
"""
