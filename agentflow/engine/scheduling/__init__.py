"""What the next forward pass computes: standard library and numpy only.

Read ``kv_memory`` (the slots of running requests around the cache) with ``liveness`` (what open states of
programs keep); ``policies`` (the interface, and the simple ones), ``fair_policy`` (the default, with its
proofs) and ``waiting_tree`` below them; then ``scheduler`` (a step, top down) with ``admission`` (memory for
outputs), ``output_lengths`` (their expected lengths), ``in_progress_prefixes`` (prefixes being computed),
``step_cost`` (seconds) and ``pass_size`` (after a lack of memory); then ``row`` (the record of one request in
a batch), ``batch_builder``, ``sampling_table`` and ``in_flight`` (the step's arrays and results).
``defaults`` has the sizes of batches.
"""
