"""Programs as data: a ``graph`` can be drawn and submitted as one op, ``optimise`` rewrites it, and ``trace``
makes it by running a program on a link that only collects ops. ``graph_result`` has the program's result, in
which the values of a run are filled in. The live graph of a running program is in
``runtime/programs/graph``.
"""
