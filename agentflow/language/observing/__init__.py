"""Observation of a session: ``runs`` lists its runs, ``spans`` reports them to OpenTelemetry, ``graph_watch``
follows the live graphs of its tenant, and ``blocking`` warns of lines that block the event loop.
"""
