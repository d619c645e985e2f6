"""What a session shows of itself: ``runs`` that ended, ``spans`` for OpenTelemetry, and ``blocking``, the
warning about lines that block the event loop.
"""
