"""Attention over the paged KV pool, and within segments of rows.

Reading order: ``segments`` (without a pool, for encoders), ``backend`` (the interface),
``reference_attention`` (written for clarity), ``shared_runs`` (prefixes that are read once for several
requests), ``groups`` (the plan of a batch for torch), ``group_attention`` (the attention of one group),
``masked_attention`` (sliding windows, capped scores and sinks), ``torch_attention`` (any device).
"""
