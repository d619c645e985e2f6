"""Decides the work of the next forward pass. Needs the standard library and numpy only.

Read ``scheduler`` (a step, top down) first, with ``kv_memory`` (the slots of running requests around the
cache, and the table of these slots), ``liveness`` (when open states continue) and ``admission`` (memory for
outputs). Then ``policies`` (the interface, and the simple ones), ``fair_policy`` (the default, between
tenants) and ``tenant_queue`` (within one), each with its proofs, ``waiting_tree`` below them, ``charges`` (of
tenants that use several engines), ``program_pauses`` (programs that wait until others have ended, while
memory is short), and ``media_work`` (the encodings of images). Then the step's arrays: ``batch_builder``,
``select`` (choices that are scored together), ``sampling_table``, and ``in_flight`` (the results).
``retries`` runs failed batches again in parts. ``step_limits`` learns how large a step may be, and ``pace``
how long one may take beside requests whose answers are read as they arrive; ``defaults`` has the sizes of
batches.

A step enters ``charges``, ``program_pauses``, ``media_work`` and ``pace`` only if there is something for them
to do.
"""
