"""What a program sees: states, variables and the branches of a fork, and the tree behind them.

Reading order: ``run`` has the tree of states and variables, which the link's events change
(``event_stream``: the events of several variables as one stream; ``reported``: the exceptions for failures
that the backend reports). ``variable`` is a value that is generated (``readers``: its value, and iterators
over it as it grows). ``recorder`` turns appended items into ops (``traced``: under a span; ``validation``:
generated again until valid). ``outliner`` makes the outline of a state for ``display``, and ``live`` redraws
it in a notebook. ``contest`` chooses between branches. ``state`` is the interface to all of these.
"""
