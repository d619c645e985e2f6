"""Engines on the nodes of a Ray cluster, and a router for Ray Serve.

Read ``host`` (the actor on a node), ``engine`` (the process that it starts), ``child`` (the server's end),
``node`` (what a node has), and ``placement`` (room for a model's replicas). ``request_router`` is for Ray
Serve, and is the only module that imports Ray when it is imported.
"""
