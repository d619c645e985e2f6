"""Constrained decoding: which tokens may come next, and which text is forced.

Read ``grammar`` (the seam that the engine uses), ``regex`` and ``json_schema`` (what constraints are parsed
to), ``char_dfa`` and ``dfa`` (how a regular expression becomes a DFA over bytes), ``token_dfa`` and
``llguidance`` (the two implementations of the seam), ``jump_forward`` (forced text), ``grammar_cache`` and
``grammar_builder`` (the engine's compiled grammars). ``compiler/`` compiles constraints in a process of its
own.
"""
