"""OpenAI's API: chat completions, completions, embeddings, models, and vLLM's tokenizer endpoints.

``types`` has the JSON shapes, ``request`` translates their fields for the engine, and ``answer`` has the
parts of all answers: usage and streams. ``chat``, ``completions``, ``decisions``, ``embeddings``, ``models``
and ``adapters`` are the endpoints, ``responses`` is the Responses API, and ``routes`` has the paths.
"""
