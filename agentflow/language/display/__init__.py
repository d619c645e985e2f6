"""What a session's objects look like in a terminal and in a notebook.

Reading order: ``outline`` finds what is known of a state, ``terminal`` and ``html`` draw it, ``live`` redraws
it while it is generated. ``svg`` draws graphs and runs.
"""
