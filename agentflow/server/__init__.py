"""The server: sessions over websockets, the APIs of others, health checks and metrics.

``serve`` runs the application that ``app`` assembles, on the models that ``models`` starts. ``service`` has
the state of a running server. Rooms: ``config`` (settings), ``http`` (requests), ``completion`` (running
them), ``openai``, ``anthropic``, ``ollama`` and ``sglang`` (the APIs), ``websocket`` (sessions), ``tenants``
(keys and rate limits), and ``metrics``.
"""
