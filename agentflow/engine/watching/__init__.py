"""Watching an engine: snapshots of its steps, requests and radix trees, and the part of them for a tenant.

``snapshot`` runs in the engine's thread and shows the ``recent_nodes`` of the cache, and ``shared_watches``
limits the cost of all watches of an engine. ``tenant_stats`` are the figures that a tenant sees, and ``view``
is a session's view of its tenant's data.
"""
