"""OpenAI's Responses API.

``responses`` answers requests, ``items`` translates them into conversations, and ``answer`` writes responses
and their events. ``background`` runs those that need no connection. ``store`` keeps responses and
conversations for later turns, ``stored`` and ``conversations`` give access to them, and ``types`` has all
shapes.
"""
