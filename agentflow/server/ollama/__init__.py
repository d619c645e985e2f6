"""Ollama's API: chat, generate, embeddings, and the descriptions of models.

``types`` has the JSON shapes, ``request`` translates their fields for the engine, and ``answer`` has answers,
lines of streams and errors. ``generation``, ``embedding`` and ``models`` are the endpoints, and ``routes``
has the paths.
"""
