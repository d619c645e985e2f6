"""Runs ops with a generator, in the client's process or in the server.

``generator`` is the interface that the interpreter needs. ``state_tree`` holds the records of states and
variables, and spreads failures. ``limits`` counts time, tokens and memory. ``interpreter`` runs the op
streams of a session. ``task_group`` has additions to anyio, ``locked_file`` files with one writer."""
