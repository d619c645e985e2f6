"""Runs ops with a generator, in the client's process or in the server.

Reading order: ``generator`` is the interface to a model, and ``interpreter`` runs the op streams of a session
with one. ``programs`` has the graphs of programs, from which the scheduler gets hints. ``loop_turns`` bounds
the session's turns of the event loop, and ``limits`` counts time, tokens and memory. Utilities for other
packages: ``declared`` describes settings, ``task_group`` extends anyio, ``payer`` is the interface to the
tenant that pays for calls to APIs, ``telemetry`` connects to OpenTelemetry, ``backoff`` computes pauses
between attempts, ``circuit`` is a circuit breaker for endpoints, ``locked_file`` opens files for a single
writer, and ``word_embedding`` embeds texts without a model.
"""
