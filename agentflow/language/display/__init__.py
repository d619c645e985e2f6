"""Drawings for terminals and notebooks, from plain data.

Reading order: ``outline`` is a state as data, which ``terminal`` and ``html`` draw. ``svg`` draws graphs and
runs.
"""
