"""Images and videos, from the bytes of a file to a ``PreparedMedium``.

The event loop uses ``reader`` (the interface), ``worker_handle`` and ``settings`` (the files of a model).
Child processes run ``worker`` (limits), ``decoding`` (Pillow and PyAV) and ``processors`` (a file for each
family of models). ``messages`` has the messages between the two sides. ``known_media`` finds the images of
states in their prompts. Nothing here imports torch: the vision towers read the arrays.
"""
