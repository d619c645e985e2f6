"""Several engines, or servers, that serve one model: which of them runs a request.

``routing`` places requests by their cost on each replica. ``simulated`` runs it on many engines without a
model, with the rules of other routers. ``ray`` starts engines on several machines, and ``replicas`` joins
the engines of a model to one.
"""
