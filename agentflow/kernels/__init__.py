"""The arithmetic of a forward pass. Imports nothing else of agentflow.

Reading order: ``inputs`` (matrices and batches as the kernels receive them), ``decoder_weights`` with
``activations`` (a whole model), ``ops`` (the interface, and the choice of an implementation),
``reference_ops`` (written for clarity), ``shared_runs`` (which prefixes are read once), ``torch_ops`` with
``attention_plan`` (any device), ``native_ops`` with ``native_structures``, ``native_library`` and the C++
sources in ``native/`` (x86 CPUs; ``__main__`` compiles them ahead of time), ``triton_ops`` (GPUs), ``ranks``
and ``shared_ranks`` (sums over processes that compute a model together), ``masked_attention`` (sliding
windows, capped scores and sinks, on every device), ``linear`` (products with weights), ``sampling`` (the choice of tokens),
``uploads`` (arrays to a device in one transfer), ``device_stream`` (the queue of a device's work),
``page_advice`` (large pages).
"""
