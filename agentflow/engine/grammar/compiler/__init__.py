"""Compiles constraints, in a separate process.

The server's side: ``compiler`` (a queue for each tenant, a cache, the processor time that compiling may use)
and ``worker_handle``. The process's side: ``worker`` (limits) and ``compile`` (the pure function), with
``explicit_schema`` (normalises JSON schemas), ``relax`` (drops keywords that a grammar cannot enforce, for
clients that accept that), ``dead_ends`` (drops patterns that no text can match), ``endless_text`` (finds
grammars whose forced text may have no end) and ``lark`` (writes grammars for llguidance). ``ebnf``
writes grammars in GBNF as expressions or as Lark grammars. ``messages`` has the messages between both sides.
"""
