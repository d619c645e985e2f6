"""What programs are written in. Knows no backend: ops go through a link, and events come back.

Reading order: ``expressions`` and ``gen`` are what a program appends, ``typed`` the types of what is
generated, ``markers`` what stands for both in strings. ``link`` connects to the backend. ``run`` has the tree
of states and variables, ``op_log`` what was appended to each state. ``recorder`` makes ops of expressions.
``variable`` and ``state`` are what a program sees. ``program``, ``map`` (with ``progress``), and ``graph``
with ``trace`` are the ways to run one; ``session`` offers them all.
"""
