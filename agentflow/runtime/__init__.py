"""Runs ops with a generator, in the client's process or in the server.

Reading order: ``generator`` is the interface to a model. ``state_tree`` has the records of states and
variables and spreads failures, and ``interpreter`` runs the op streams of a session on both; ``wired_text``
waits for the variables that a text refers to.
``image_store`` keeps the images that the session has uploaded. ``turns`` bounds
its turns of the event loop, ``limits`` counts time, tokens and memory, and ``observation`` lets clients watch
the scheduler. ``programs`` is the graph of a program, which advises the scheduler. Ground for other packages:
``declared`` describes settings, ``task_group`` extends anyio, ``payer`` says who pays for calls to APIs,
``telemetry`` connects to OpenTelemetry, ``backoff`` computes pauses between attempts, ``circuit`` learns
whether an endpoint is asked at all, ``locked_file`` writes files with one writer, and ``word_embedding``
embeds texts without a model.
"""
