"""The arrays of a batch.

``batch_builder`` gathers them from the rows of a step and keeps the parameters by which each row samples, and
``select`` adds the choices that are scored together.
"""
