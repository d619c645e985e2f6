"""Weights in their formats, and products with them.

Reading order: ``routing`` (the experts of a row), ``grouped`` and ``method`` (the interfaces),
``reference_linear`` (written for clarity), ``torch_linear`` (any device). Platforms add their formats: panels
on CPUs, and blocks or 8-bit floats on GPUs.
"""
