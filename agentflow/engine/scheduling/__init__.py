"""Decides the work of the next forward pass. Needs the standard library and numpy only.

Read ``scheduler`` (a step, top down) first, with ``kv_memory`` (the slots of running requests around the
cache, and the table of these slots), ``liveness`` (when open states continue) and ``admission`` (memory for
outputs). Then ``policies`` (which prompt is next), ``program_pauses`` (programs that wait until others have
ended, while memory is short), and ``media_work`` (the encodings of images). Then ``rows`` (the arrays of a
batch) and ``in_flight`` (its results); ``retries`` runs failed batches again in parts. ``step_limits`` learns
how large a step may be, and ``pace`` limits its time while answers are read as they arrive; ``defaults`` has
the sizes of batches.

A step enters ``policies/charges``, ``program_pauses``, ``media_work`` and ``pace`` only if there is something
for them to do.
"""
