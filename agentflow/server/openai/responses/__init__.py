"""OpenAI's Responses API.

``types`` has the JSON shapes, ``items`` translates requests into conversations, and ``answer`` writes
responses and their events. ``responses`` answers requests, ``stored`` gives access to stored responses and
``conversations`` to conversations, and ``routes`` has the paths.
"""
