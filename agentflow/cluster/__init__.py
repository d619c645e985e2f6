"""Several engines that serve one model: which of them runs a request.

Read ``prefix_tree`` (which tokens each replica holds), ``feed`` (how the router learns it), ``load`` (what a
request would cost on each replica), ``router`` (places requests by this cost), ``published`` (other routers'
rules, for comparison), and ``simulation`` (many engines without a model). Then the real engines:
``replica_set`` (the link between a client and several processes), with ``requests`` (what the router reads of
a request), ``replica_queries`` and ``merged_answers`` (one answer from all replicas), ``charge_exchange``
(tenants that use several) and ``measured_cost`` (the cost of this machine). ``shares`` divides a machine
among them, ``open_replicas`` starts them, and ``ray`` runs them on several machines.

For servers of other makes, which report nothing: ``sent_cache`` (what a server's cache holds of the prompts
that it was sent), ``learned_cost`` (how long its requests take), and ``text_router`` (the router on both,
over text instead of tokens).
"""
