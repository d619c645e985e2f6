"""The machine below the engine.

``resources`` are its processors and free memory, ``child_process`` is a process that may fail without the
server, and ``child_limits`` bounds the work in such a process.
"""
