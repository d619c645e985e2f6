"""Norms and rotary embeddings: functions that work on each row by itself.

Reading order: ``row_ops`` (the functions), ``reference_rows`` (written for clarity), ``torch_rows`` (any
device).
"""
