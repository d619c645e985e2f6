"""Metrics for Prometheus.

``request_times`` measures requests, and ``metrics`` collects and renders all metrics.
"""
