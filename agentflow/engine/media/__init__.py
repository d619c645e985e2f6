"""Images and videos, from the bytes of a file to a ``PreparedMedium``.

On the event loop's side: ``reader`` (the interface), ``worker_handle`` and ``settings`` (the files of a
model). In processes of the server: ``worker`` (limits), ``decoding`` (Pillow and PyAV) and ``processors`` (a
file for each family of models). ``messages`` has the messages between both. ``known_media`` finds the images
of states in their prompts. Nothing here imports torch: the vision towers read the arrays.
"""
