"""The arrays of a batch.

``batch_builder`` gathers them from the rows of a step, ``select`` adds the choices that are scored together,
and ``sampling_table`` the parameters by which each row samples.
"""
