"""Watching an engine: snapshots of its steps, requests and radix trees, and who may see what of them.

``snapshot`` runs in the engine's thread and shows the ``recent_nodes`` of the cache, and ``hub`` limits what
all watches of an engine cost. ``tenant_stats`` are the figures that a tenant sees, and ``view`` is a
session's view of its tenant's data.
"""
