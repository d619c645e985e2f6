"""Several engines, or servers, that serve one model, and the choice among them.

``routing`` places requests by their cost on each replica. ``simulated`` runs this router on many engines
without a model, and the rules of other routers for comparison. ``ray`` starts engines on several machines,
and ``replicas`` puts the engines of a model behind one client.
"""
