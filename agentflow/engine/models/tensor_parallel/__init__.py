"""One model on several processes, each with a part of the weights and of the KV pool (tensor parallelism).

The engine's process is rank 0: it schedules, starts the other ranks, and samples. Read ``runner`` (implements
``ModelRunner``), ``rank_group`` (starts and ends the processes), ``rank_process`` (the main module of the
other ranks), ``joining`` (how ranks connect) and ``steps`` (the message of a batch for the other ranks).
``weights.cuts`` divides the weights, and ``kernels.ranks`` adds results over the ranks.
"""
