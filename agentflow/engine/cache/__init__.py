"""The KV cache: which token sequences are cached.

Read ``radix_cache`` (the trees, and eviction), ``holdings`` (which tenants lose tokens) and ``blocks``
(the digests by which other processes see the cache).
"""
