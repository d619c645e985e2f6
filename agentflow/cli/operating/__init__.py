"""The commands of an operator. ``serve`` runs the server, ``up`` also opens its page; ``config`` shows the
settings of both, and ``keys`` makes API keys. ``top`` watches a server that runs, and ``simulate`` replays a
workload without one.
"""
