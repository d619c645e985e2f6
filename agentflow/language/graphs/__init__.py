"""Programs as data: ``graph`` is what can be drawn, optimised and submitted as one op, and ``trace`` makes it
of a program, on a link that only collects ops.
"""
