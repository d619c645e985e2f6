"""Attention over the paged KV pool, and within segments of rows.

Reading order: ``segments`` (without a pool, for encoders), ``backend`` (the interface),
``reference_attention`` (written for clarity), ``shared_runs`` (which prefixes are read once), ``groups``
(the plan of a batch for torch), ``group_attention`` (one group of it), ``masked_attention`` (sliding
windows, capped scores and sinks), ``torch_attention`` (any device).
"""
