"""OpenAI's Responses API.

``types`` has the JSON shapes, ``items`` translates requests into conversations, and ``answer`` writes
responses and their events. ``responses`` answers requests, ``stored`` and ``conversations`` give access to
the stored ones, and ``routes`` has the paths.
"""
