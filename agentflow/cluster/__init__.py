"""Several engines that serve one model: which of them runs a request.

Read ``prefix_tree`` (which tokens each replica holds), ``feed`` (how the router learns it), ``load`` (what a
request would cost on each replica), ``router`` (places requests by this cost), ``published`` (other routers'
rules, for comparison), and ``simulation`` (many engines without a model).
"""
