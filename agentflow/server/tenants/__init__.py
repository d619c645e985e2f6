"""Tenants: API keys and rate limits.

``rate_limit`` has the limits of each tenant, ``shared_limit`` the limits over several fronts, and
``limit_headers`` shows a client the rest of its limits. ``tickets`` let pages open sessions without a key,
also at another front (``shared_tickets``), and ``keys`` finds the tenant of a key or a ticket.
"""
