"""Watching an engine: snapshots of its steps, requests and radix trees, and the part that a tenant sees.

``snapshot`` runs in the engine's thread and includes the ``recent_nodes`` of the cache. ``shared_watches``
limits the cost of all watches of an engine. ``tenant_stats`` counts the figures of a tenant, and ``view`` is
a session's view of its tenant's data.
"""
