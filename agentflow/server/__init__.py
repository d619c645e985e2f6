"""The server: sessions over websockets, the APIs of others, health checks and metrics.

``serve`` runs the application that ``app`` assembles, on the models that ``open_models`` starts. ``service``
has the state of a running server, ``models`` its models. Rooms: ``config`` (settings), ``http`` (requests),
``completion`` (running them), ``openai``, ``anthropic``, ``ollama`` and ``sglang`` (the APIs), ``websocket``
(sessions), ``tenants`` (keys and rate limits), and ``metrics``.
"""
