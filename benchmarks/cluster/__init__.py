"""Several replicas behind a router, simulated: ``python -m benchmarks cluster``."""
