"""Decides the work of the next forward pass. Needs the standard library and numpy only.

Read ``scheduler`` (a step, top down) first, with ``kv_memory`` (the slots of running requests around the
cache) and ``admission`` (memory for outputs). Then ``policies`` (the interface, and the simple ones),
``fair_policy`` (the default, with its proofs), ``waiting_tree`` below them, ``charges`` (of tenants that use
several engines), and ``program_pauses`` (programs that wait until others have ended, while memory is short),
and ``media_work`` (the encodings of images). Then the step's arrays:
``row`` (the record of one request in a batch), ``batch_builder``, ``slot_table`` (where the keys and values
of its tokens are), ``select`` (choices that are scored together), ``sampling_table``, and ``in_flight`` (the
results). ``step_limits`` learns how large a step may be, and ``pace`` how long one may take beside
requests whose answers are read as they arrive; ``defaults`` has the sizes of batches. ``decode_run`` counts
steps without batches, for simulators.
"""
