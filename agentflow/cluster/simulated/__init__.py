"""Routers in the simulator: ``published`` has the rules of other routers, for comparison, and ``simulation``
runs many engines without a model."""
