"""The language of programs: states, variables, forks and generations. It depends on no backend: ops leave
through a link, and events come back through it.

Reading order: ``expressions`` has the items that a program appends, ``gen`` the items that generate or choose
text, and ``media`` makes images and videos. ``markers`` carries references through f-strings, and ``typed``
describes the types of values.
``states`` has states, variables and branches; ``op_log`` keeps the ops and the content of a state. ``link``
sends ops to the backend, with the images that they need (``uploads``), and delivers its events. ``program``
makes a program of a function and runs it, ``graphs`` compiles it into one op, ``batch`` runs it on many
inputs, ``race`` runs several tasks for one result, and ``agents`` lets a model call tools. ``session`` offers
all of these, and ``host`` keeps a session open from one notebook cell to another. ``observing`` records runs
and spans and warns of code that blocks the event loop, ``display`` draws states, runs and graphs,
``failures`` finds the line of the program that caused an error, ``by_name`` pickles decorated functions, and
``records`` reads and copies dataclasses and their like.
"""
