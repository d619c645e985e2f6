"""Limits of the input of clients: ``json_bounds`` checks JSON before it is decoded, ``client_pattern`` bounds
regular expressions, and ``sized`` measures the objects that are kept.
"""
