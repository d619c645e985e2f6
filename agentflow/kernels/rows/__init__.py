"""Norms and rotary embeddings: functions of single rows.

Reading order: ``row_ops`` (the functions), ``reference_rows`` (written for clarity), ``torch_rows`` (any
device).
"""
