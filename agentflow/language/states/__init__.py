"""What a program sees: states, variables and the branches of a fork, and the tree behind them.

Reading order: ``run`` has the tree of states and variables, which the link's events change. ``variable`` is a
value that will be there (``readers``: its text as it grows; ``partial_value``: JSON that is still generated).
``recorder`` makes ops of what is appended (``traced``: under a span; ``validation``: generated again until it
is valid). ``state`` is the front of all of it, ``contest`` chooses between branches, and ``failures`` makes
the errors that programs see.
"""
