"""What a backend knows about the programs that it runs.

``place``: where a state stands in its program, which the scheduler reads.
"""
