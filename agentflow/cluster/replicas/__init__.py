"""The engines of one model behind one client.

``replica_set`` is the link between the client and several processes, with ``requests`` (what the router reads
of a request), ``replica_queries`` and ``merged_answers`` (one answer from all replicas), ``charge_exchange``
(tenants that use several) and ``measured_cost`` (the cost of this machine). ``shares`` divides a machine
among them, ``shared_devices`` tells the routers of several models where their engines share a GPU, and
``open_replicas`` starts the engines.
"""
