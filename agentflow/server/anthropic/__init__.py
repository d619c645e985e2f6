"""Anthropic's API: messages and token counts.

``types`` has the JSON shapes, ``conversation`` translates messages and tools into those of chat templates,
``answer`` has whole answers, events and errors, and ``messages`` the endpoints.
"""
