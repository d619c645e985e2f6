"""Metrics for Prometheus: ``request_times`` measures requests, ``metrics`` collects and renders them all."""
