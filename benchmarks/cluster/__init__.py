"""Several replicas behind a router, simulated, and a model on two processes: ``python -m benchmarks
cluster``."""
