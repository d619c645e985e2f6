"""The KV cache: which token sequences are cached. ``scheduling/kv_memory`` has the slots of running requests.

Read ``radix_cache`` (the trees, and eviction), ``nodes`` (their nodes, and which are evicted first),
``token_run`` (token ids as bytes), ``blocks`` (the reports by which other processes see the cache),
``evicted_blocks`` (which tokens were evicted), ``prefix_readers`` (which prefixes running requests share) and
``prefix_marks`` (which prefixes clients asked to keep).
"""
