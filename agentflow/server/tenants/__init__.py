"""Tenants: API keys and rate limits.

``rate_limit`` limits what each tenant may use, ``shared_limit`` over several fronts, and ``limit_headers``
shows a client the rest of its limits. ``tickets`` let pages open sessions without a key, also at another
front (``shared_tickets``), and ``keys`` finds the tenant of a key or a ticket.
"""
