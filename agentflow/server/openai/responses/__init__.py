"""OpenAI's Responses API.

``responses`` answers requests, ``items`` translates them into conversations, ``answer`` writes responses and
their events, ``store`` keeps them for later turns, and ``types`` has their shapes.
"""
