"""Which request gets the next prompt tokens of a step.

Read ``policy`` (the interface, and the simple policies), ``fair_policy`` (the default, between tenants) and
``tenant_queue`` (within one), each with its proofs. ``waiting_tree``, below them, knows which waiting request
has the longest cached prefix, and ``charges`` is for tenants that use several engines. Policies
that exist only for comparison are in ``simulator``.
"""
