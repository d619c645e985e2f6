"""The engines of one model behind one client.

``replica_set`` is the link between the client and several processes, with ``requests`` (a request as the
router sees it), ``placing_turn`` (requests of all models are placed together), ``replica_queries`` and
``merged_answers`` (one answer from all replicas), ``charge_exchange`` (tenants that use several) and
``measured_cost`` (the cost of this machine). ``shares`` divides a machine among them, ``shared_devices``
finds the GPUs of an engine, and ``open_replicas`` starts the engines.
"""
