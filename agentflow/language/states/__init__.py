"""States, variables and branches as a program sees them, and the tree behind them.

Reading order: ``state`` is the interface for programs: it appends, forks and joins. ``recorder`` turns
appended items into ops; ``traced`` begins their spans, and ``validation`` generates again until a text is
valid. ``run`` has the tree of states and variables, which the backend's events change, and ``reported`` makes
the exceptions for failures among these events. ``variable`` is a value that is still being generated,
``readers`` iterates over it as it grows, and ``event_stream`` has the events of several variables.
``contest`` chooses between branches. ``outliner`` makes the outline of a state for drawings, and
``live_display`` redraws it in a notebook.
"""
