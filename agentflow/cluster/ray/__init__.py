"""Engines on the nodes of a Ray cluster.

Read ``host`` (the actor on a node), ``engine`` (the process that it starts), ``child`` (the server's end),
``node`` (what a node has), and ``placement`` (room for a model's replicas). Only functions import Ray.
"""
