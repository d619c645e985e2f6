"""A backend's knowledge of the programs that it runs.

``graph``: the live graph of a session's requests and variables. ``deduction``: the objectives, task groups
and steps that follow from it. ``live``: the graph as a client sees it. ``watch``: the changes in it since a
client last looked. ``place``: where a state stands in its program, which the scheduler reads. ``store``:
programs that live on between the requests of their clients.
"""
