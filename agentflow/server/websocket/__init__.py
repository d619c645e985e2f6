"""Sessions over websockets.

``connection`` serves one websocket, ``sessions`` keeps sessions that outlive a connection, and ``frames``
checks received frames and splits events into frames.
"""
