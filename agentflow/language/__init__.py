"""What programs are written in. Knows no backend: ops go through a link, and events come back.

Reading order: ``expressions`` and ``gen`` are what a program appends, ``typed`` the types of what is
generated, ``markers`` what stands for both in strings. ``op_log`` keeps what was appended to a state.
``link`` connects to the backend, and ``observing`` watches it. ``states`` are what a program sees, with the
tree behind them. ``program``, ``batch``, ``race``, ``agents`` and ``graphs`` are the ways to run something;
``session`` offers them, and ``host`` keeps one open without a block. ``display`` draws states, runs and
graphs. ``by_name`` is how decorated functions are pickled. ``failures`` are errors as programs
see them: where they come from, and what to write instead.
"""
