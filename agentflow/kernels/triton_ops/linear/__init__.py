"""Products of rows with weights.

Reading order: ``one_row`` (products of one row with a dense weight), ``split_products`` (shared by the next
two), ``fp8`` (weights in 8-bit floats), ``quantised`` (weights in blocks); ``row_blocks`` (rows sorted by the
matrix that multiplies them), ``grouped_products`` and ``mixture`` (experts), ``low_rank`` (adapters);
``triton_linear`` chooses among them.
"""
