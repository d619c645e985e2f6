"""Tenants: ``keys`` finds the tenant of an API key, and ``rate_limit`` limits what each tenant may use."""
