"""Routers in the simulator: ``published`` has the rules of other routers, for comparison, ``simulation`` runs
many engines without a model, and ``several_models`` runs models that share devices."""
