"""What a program sees: states, variables and the branches of a fork, and the tree behind them.

Reading order: ``run`` has the tree of states and variables, which the link's events change (``event_stream``:
several variables' events in one). ``variable`` is a value that will be there (``readers``: its value, and
iterators over it as it grows). ``recorder`` makes ops of what is appended (``traced``: under a span;
``validation``: generated again until it is valid). ``state`` is the front of all of it, and ``contest``
chooses between branches.
"""
