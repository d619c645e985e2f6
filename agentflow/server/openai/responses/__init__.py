"""OpenAI's Responses API.

``types`` has all shapes. ``responses`` answers requests, ``items`` translates them into conversations, and
``answer`` writes responses and their events. ``stored`` and ``conversations`` give access to what the server
keeps.
"""
