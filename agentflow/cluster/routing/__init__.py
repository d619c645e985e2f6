"""The router: which replica runs a request.

Read ``prefix_tree`` (which tokens each replica holds), ``feed`` (how the router learns it), ``load`` (what a
request would cost on each replica), ``families`` (the work of requests that will continue it), ``router``
(places requests by this cost), ``devices`` (that engines of several models share), and ``placement``
(requests of several models, together).

For servers of other makes, which report nothing: ``sent_cache`` (what a server's cache holds of the prompts
that it was sent), ``learned_cost`` (how long its requests take), and ``text_router`` (the router on both,
over text instead of tokens).
"""
