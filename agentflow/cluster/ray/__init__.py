"""Engines on the nodes of a Ray cluster, and a router for Ray Serve.

Read ``host`` (the actor on a node), ``engine`` (the process that it starts), ``divided`` (a model over more
than one node), ``child`` (the server's end), ``node`` (a node's resources), ``bundles`` (room for a model's
replicas), ``options`` and ``models`` (all models of a server). ``request_router`` is for Ray Serve; it alone
imports Ray when it is imported.
"""
