"""OpenAI's API: chat completions, completions, models, and vLLM's tokenizer endpoints.

``types`` has the JSON shapes, ``request`` translates their fields for the engine, and ``answer`` has what all
answers share: errors, usage and streams. ``chat``, ``completions`` and ``models`` are the endpoints.
"""
