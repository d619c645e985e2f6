"""Models on torch: a model folder, a KV pool, one forward pass for each batch.

Read ``torch_runner`` (implements ``ModelRunner``), ``llama`` (the forward pass), ``config`` and ``rope``
(``config.json``), ``checkpoint`` (tensors by name), ``loader`` (to packed weights), ``kv_pool`` and
``page_advice`` (memory), ``sampler`` (logits to tokens).
"""
