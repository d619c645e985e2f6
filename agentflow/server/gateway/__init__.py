"""A gateway in front of any servers with OpenAI's API: ``agentflow route``.

In the order of imports: ``defaults`` has the settings, ``request_facts`` reads from a request the facts that
decide its target, ``cache_size`` reads metrics of servers, ``target`` is one server with its health,
``target_choice`` chooses a target, and ``client_body`` reads the body of a client. ``http_proxy`` forwards
requests, ``websocket_proxy`` websockets, and ``model_lists`` joins the lists of models. ``metrics`` has the
metrics, ``gateway`` is the application, and ``route`` runs it.
"""
