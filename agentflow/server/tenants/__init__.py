"""Tenants: ``keys`` finds the tenant of an API key, ``rate_limit`` limits what each tenant may use, and
``limit_headers`` writes what is left of it."""
