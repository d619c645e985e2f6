"""The kernels in Triton, for GPUs. They run on CPUs only under Triton's interpreter
(``TRITON_INTERPRET=1``), for tests.

Reading order: ``interpreted`` (the products and the rounding that all kernels share), ``device_limits``,
``early_start`` (a launch before the previous kernel has ended), ``attention``, ``triton_rows`` (norms, rotary
embeddings and the gated activation), ``linear`` (products with weights) and ``triton_sampler``.
"""
