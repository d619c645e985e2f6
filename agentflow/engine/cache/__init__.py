"""The KV cache: ``radix_cache`` (which token sequences are cached, and what is evicted), ``kv_manager`` (the
slots of running requests around it), ``liveness`` (what open states of programs keep)."""
