"""Limits of the input of clients: ``json_bounds`` checks JSON before it is decoded, ``client_pattern`` bounds
regular expressions, ``schema_check`` checks texts against JSON schemas in a bounded time, ``cpu_allowance``
bounds processor time, and ``sized`` measures the objects that are kept.
"""
