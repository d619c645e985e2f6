"""Runs ops with a generator, in the client's process or in the server.

Reading order: ``generator`` is the interface to a model, and ``interpreter`` runs the op streams of a session
with one. ``programs`` is the graph of a program, which advises the scheduler. ``loop_turns`` bounds the
session's turns of the event loop, and ``limits`` counts time, tokens and memory. Ground for other packages:
``declared`` describes settings, ``task_group`` extends anyio, ``payer`` is the tenant that pays for calls to
APIs, ``telemetry`` connects to OpenTelemetry, ``backoff`` computes pauses between attempts, ``circuit``
decides whether an endpoint is asked at all, ``locked_file`` writes files with one writer, and
``word_embedding`` embeds texts without a model.
"""
