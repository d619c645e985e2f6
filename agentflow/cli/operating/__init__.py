"""The commands of an operator.

Reading order: ``served_apis`` opens models behind an API, ``serve`` runs the server, and ``up`` also pulls
the model and opens the page; ``ray_serve`` runs the server in Ray Serve. ``config`` shows the settings of
both, and ``keys`` creates API keys. ``route`` runs a gateway in front of several servers. ``top`` shows the
load of a running server and ``watch`` its programs, and ``simulate`` replays a workload without a server.
"""
