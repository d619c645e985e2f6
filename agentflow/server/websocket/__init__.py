"""Sessions over websockets.

``sessions`` keeps sessions, which outlive their connections. ``frames`` checks received frames and splits
events into frames, and ``connection`` serves one websocket.
"""
