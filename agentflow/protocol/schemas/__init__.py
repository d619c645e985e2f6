"""JSON schemas as data: ``walk`` traverses them, ``references`` resolves their references, ``hoisting`` moves
them into larger ones, and ``decimals`` writes ranges of numbers as patterns.
"""
