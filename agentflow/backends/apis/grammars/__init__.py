"""Patterns and grammars of constraints, as servers read them.

``gbnf`` reads patterns and writes them as llama.cpp's grammars, and ``lark_grammar`` does so with Lark's,
whose rules ``left_recursion`` rewrites. ``xgrammar_pattern`` writes patterns for vLLM and SGLang.
"""
