"""Several engines that serve one model: which of them runs a request.

Read ``prefix_tree`` (which tokens each replica holds), ``feed`` (how the router learns it), ``load`` (what a
request would cost on each replica), ``router`` (places requests by this cost), ``published`` (other routers'
rules, for comparison), ``simulation`` (many engines without a model), and ``ray`` (engines on several
machines).

For servers of other makes, which report nothing: ``sent_cache`` (what a server's cache holds of the prompts
that it was sent), ``learned_cost`` (how long its requests take), and ``text_router`` (the router on both,
over text instead of tokens).
"""
