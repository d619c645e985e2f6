"""Models on torch: a model folder, a KV pool, one forward pass for each batch.

Read ``torch_runner`` (implements ``ModelRunner``), ``device`` (types, kernels, failures), ``config`` and
``rope`` (``config.json``), ``families`` (architectures), ``weights`` (files to packed weights), ``forward``
(the forward passes), ``kv_pool``, ``sampler`` (logits to tokens), ``device_steps`` (batches launched ahead on
a GPU) with ``device_table`` (their requests' slots on the device) and ``table_copy`` (the changes that such a
copy needs), ``tensor_parallel`` (one model on several processes), ``vision`` (towers for images), ``lora``
(adapters), ``transformers_model`` (other architectures), and for embeddings ``pooling`` and
``encoder_runner`` (models that read a whole text in one pass). ``memory_need`` estimates memory before
anything is loaded.
"""
