"""Replicas behind a router, simulated and real, gateways, and models on two processes: ``python -m benchmarks
cluster``."""
