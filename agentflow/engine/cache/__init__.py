"""The KV cache: which token sequences are cached.

Read ``radix_cache`` (the trees, and eviction), ``holdings`` (which tenants lose tokens), ``blocks``
(the digests by which other processes see the cache), ``block_feed`` (reports of these, numbered),
``evicted_blocks`` (which tokens were evicted), ``prefix_readers`` (which prefixes running requests share) and
``prefix_marks`` (which prefixes clients asked to keep).
"""
