"""Watching an engine: snapshots of its steps, requests and radix trees, and who may see what of them.

``snapshot`` runs in the engine's thread and shows the ``recent_nodes`` of the cache, ``hub`` limits what all
watches of an engine cost, and ``view`` is what one tenant's session sees.
"""
