"""Observation of a session: ``runs`` lists its runs, ``spans`` reports them to OpenTelemetry, and
``blocking`` warns of lines that block the event loop.
"""
