"""Constrained decoding: which tokens may come next, and which text is forced.

Read ``grammar`` (the seam that the engine uses), ``regex`` and ``json_schema`` with ``json_scalars`` (the
tree of a constraint), ``char_dfa`` and ``dfa`` (how a regular expression becomes a DFA over bytes),
``token_dfa`` and ``llguidance`` (the two implementations of the seam) and ``json_lengths`` (ends values that
would continue forever). ``compiler/`` compiles constraints in a separate process.
"""
