"""The machine below the engine.

``resources`` finds its processors and free memory, ``child_process`` runs a process that may fail without
affecting the server, and ``child_limits`` bounds the work in such a process.
"""
