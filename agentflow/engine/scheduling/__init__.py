"""What the next forward pass computes: standard library and numpy only.

Read ``policy`` (the interface), ``fair_policy`` (the default, with its proofs) and ``waiting_tree`` below it;
then ``scheduler`` (a step, top down) with ``admission`` (memory for outputs), ``in_progress_prefixes``
(prefixes being computed), ``step_cost`` (seconds) and ``pass_size`` (after a lack of memory); then
``batch_builder``, ``sampling_table`` and ``in_flight`` (the step's arrays and results). ``policies`` has the
simple policies and the table of names.
"""
