"""One model on several processes, of which each has a part of its weights and of its KV (tensor parallel).

The engine's process is rank 0: it schedules, starts the other ranks, and samples. Read ``runner`` (implements
``ModelRunner``), ``rank_group`` (starts and ends the processes), ``rank_process`` (the main module of the
other ranks), ``joining`` (how they meet) and ``steps`` (a batch as the other ranks receive it).
``weights.cuts`` divides the weights, and ``kernels.ranks`` adds over the ranks.
"""
