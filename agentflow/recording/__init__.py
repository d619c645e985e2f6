"""Recordings of sessions on disk.

Reading order: ``file`` writes and reads the lines of a recording, and ``images`` the images next to it.
``places`` identifies ops independently of the numbers that a client chose. ``runs`` reconstructs the runs of
a recording, for ``backends/replay`` and ``agentflow replay``.
"""
