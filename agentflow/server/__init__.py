"""The server: sessions over websockets, the APIs of other vendors, health checks and metrics.

In the order of imports: ``log`` formats the log, ``addresses`` knows loopback addresses and clients,
``errors`` has the status and code of each error, and ``event_stream`` writes server-sent events. ``config``
has the settings, ``stores`` the store of several servers, ``tenants`` keys and rate limits, ``models`` the
models, for which ``image_fetcher`` fetches images, ``websocket`` sessions, ``responses`` the stored
responses, ``programs`` the programs that outlive their requests, and ``metrics`` the metrics. ``service`` is
the state of a running server. ``http`` reads requests and answers them, and ``completion`` runs them.
``openai``, ``anthropic``, ``ollama``, ``sglang`` and ``programs_api`` are the APIs, and ``compatible`` has
their common fields. ``replicas`` shows and drains the replicas of models. ``routes`` joins all paths, which
``openapi`` describes, ``origin_guard`` rejects pages of other sites, and ``ui`` serves the server's page.
``app`` assembles the application, and ``serve`` runs it. ``gateway`` is an application that distributes
requests among other servers.
"""
