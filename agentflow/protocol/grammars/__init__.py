"""Grammars as trees, for the engine and for the backends behind APIs."""
