"""Anthropic's API: messages, token counts, and models.

``types`` has the JSON shapes, ``conversation`` translates messages and tools for chat templates, and
``answer`` has whole answers, events and errors. ``messages`` and ``models`` are the endpoints, and ``routes``
has the paths.
"""
