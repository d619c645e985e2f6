"""The KV cache: which token sequences are cached.

Read ``radix_cache`` (the trees, and what is evicted), ``holdings`` (which tenants lose tokens) and ``blocks``
(the digests by which other processes see the cache).
"""
