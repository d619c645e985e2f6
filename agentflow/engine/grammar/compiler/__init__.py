"""Compiles constraints, in a process of its own.

The server's side: ``compiler`` (a queue for each tenant, a cache, the processor time that compiling may use)
and ``worker_handle``. The process's side: ``worker`` (limits) and ``compile`` (the pure function), with
``schema_check`` (normalises JSON schemas), ``dead_ends`` (drops patterns that no text can match) and ``lark``
(writes grammars for llguidance). ``messages`` is what they exchange.
"""
