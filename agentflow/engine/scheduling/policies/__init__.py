"""Which request gets the next prompt tokens of a step.

Read ``policy`` (the interface, and the simple policies), ``fair_policy`` (the default, between tenants) and
``tenant_queue`` (within one). ``arrival_queue`` bounds overtaking, and ``match_order`` orders requests by
their cached prefixes. ``waiting_tree``, below it, knows which waiting request has the longest one, and
``charges`` is for tenants that use several engines. Policies that exist only for comparison are in
``simulator``.
"""
