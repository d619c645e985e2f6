"""A request under a grammar, and under the budget of its reasoning.

``grammar_cache`` has the grammars of an engine, which ``grammar_builder`` builds in its own thread.
``jump_forward`` finds the text that a grammar forces, and its tokens. ``constrained_request`` follows the
output of one request: its reasoning, then its text under the grammar.
"""
