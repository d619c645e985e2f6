"""Metrics for Prometheus.

``request_times`` measures requests, ``api_calls`` the calls to models behind an API, and ``metrics`` collects
and renders all metrics.
"""
