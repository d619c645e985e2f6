"""OpenAI's Responses API.

``types`` has the JSON shapes, ``items`` translates those of requests into conversations, and ``answer``
writes responses and their events. ``responses`` answers requests, ``stored`` and ``conversations`` give
access to what the server keeps, and ``routes`` has the paths.
"""
