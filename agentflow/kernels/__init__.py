"""The arithmetic of a forward pass. Imports nothing else of agentflow.

Reading order: ``inputs`` (matrices and batches as the kernels receive them), ``decoder_weights`` with
``activations`` (a whole model), ``attention``, ``linear`` (products with weights) and ``sampling`` (the choice
of tokens), ``ops`` (the other functions, and the choice of an implementation),
``reference_ops`` (written for clarity), ``torch_ops`` (any device), ``native_ops`` with ``native_structures``, ``native_library`` and the C++
sources in ``native/`` (x86 CPUs; ``__main__`` compiles them ahead of time), ``triton_ops`` (GPUs), ``ranks``
and ``shared_ranks`` (sums over processes that compute a model together), ``uploads`` (arrays to a device in one transfer), ``device_stream`` (the queue of a device's work),
``page_advice`` (large pages).
"""
