"""The arithmetic of a forward pass. Imports nothing else of agentflow.

Four interfaces, and their implementations by platform. Reading order: ``activations``, ``inputs`` (matrices
and batches as the kernels receive them), ``ranks`` (sums over processes that compute a model together) and
``decoder_weights`` (a whole model); ``attention``, ``linear`` (products with weights), ``rows`` (norms and
rotary embeddings) and ``sampling`` (the choice of tokens), each with its interface, the reference and
torch's implementation; ``native_ops`` over the C++ sources in ``native/``, which ``native_library`` compiles
(x86 CPUs; ``__main__`` compiles ahead of time); ``triton_ops`` (GPUs); ``platforms`` (the kernels of each
platform, and the choice). Below them: ``uploads`` (arrays to a device in one transfer), ``device_stream``
(the queue of a device's work) and ``page_advice`` (large pages).
"""
