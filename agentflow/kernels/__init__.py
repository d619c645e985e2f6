"""The arithmetic of a forward pass. Imports nothing else of agentflow.

There are four interfaces, with implementations by platform. Read ``activations``, ``inputs`` (matrices and
batches as the kernels receive them), ``ranks`` (sums over processes that compute a model together) and
``decoder_weights`` (a whole model). Then ``attention``, ``linear`` (products with weights), ``rows`` (norms
and rotary embeddings) and ``sampling`` (the choice of tokens), each with its interface, the reference and
torch's implementation. Then ``native_ops`` over the C++ sources in ``native/``, which ``native_library``
compiles (x86 CPUs; ``__main__`` compiles ahead of time), ``triton_ops`` (GPUs) and ``platforms`` (the kernels
of each platform, and the choice). All use ``uploads`` (arrays to a device in one transfer), ``device_stream``
(the queue of a device's work) and ``page_advice`` (large pages).
"""
