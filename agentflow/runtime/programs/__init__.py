"""A backend's knowledge of the programs that it runs.

``graph``: the live graph of a session's requests and variables. ``deduction``: the objectives, task groups
and steps derived from it. ``live``: the graph as a client sees it. ``watch``: the changes of the graph that a
client has not received. ``scheduling_hint``: the position of a state in its program, for the scheduler.
``store``: programs that outlive the requests of their clients.
"""
