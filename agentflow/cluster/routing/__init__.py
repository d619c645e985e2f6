"""The router: which replica runs a request.

Read ``prefix_tree`` (which tokens each replica holds), ``feed`` (how the router learns it), ``load`` (the
cost of a request on each replica), ``request_families`` (the work of requests that will continue it),
``router`` (places requests by this cost), ``devices`` (that engines of several models share), and
``placement`` (requests of several models, together).

For other servers, which report nothing: ``sent_cache`` (an estimate of a server's cache from the prompts that
it was sent), ``learned_cost`` (how long its requests take), and ``text_router`` (the router on both, over
text instead of tokens).
"""
