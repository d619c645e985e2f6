"""Programs as data: ``graph`` can be drawn, optimised and submitted as one op, and ``trace`` makes it by
running a program on a link that only collects ops.
"""
