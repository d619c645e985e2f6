"""Metrics for Prometheus: ``metrics`` collects and renders them, ``request_times`` measures requests."""
