"""Attention over paged keys and values.

Reading order: ``units`` divides the attention of a batch into units of work, ``device_plan`` has them on the
device, ``paged_attention`` computes them, and ``triton_attention`` implements the interface.
"""
