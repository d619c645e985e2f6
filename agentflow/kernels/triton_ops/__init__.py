"""The kernels in Triton, for GPUs. They run on CPUs only under Triton's interpreter
(``TRITON_INTERPRET=1``), for tests.

Reading order: ``interpreted`` (the products and the rounding that all kernels share), ``early_start`` (a
launch before the kernel in front has ended); ``units`` (the attention of a batch, divided into units of
work), ``device_plan`` (units on the device), ``paged_attention`` (their computation), ``triton_attention``;
``triton_rows`` (norms, rotary embeddings and the gated activation); ``one_row`` (products of one row with a
dense weight), ``split_products`` (the parts that the next two share), ``fp8`` (weights in 8-bit floats),
``quantised`` (weights in blocks); ``row_blocks`` (rows sorted by the matrix that multiplies them),
``grouped_products`` and ``mixture`` (experts), ``low_rank`` (adapters); ``triton_linear``;
``triton_sampler``.
"""
