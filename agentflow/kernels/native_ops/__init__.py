"""The kernels in C++ (``native/``): an implementation of each interface, and a whole forward pass in one
call. They run on a team of threads.

Reading order: ``structures`` (the library's arguments and functions), ``team`` (the library and its
threads), ``native_linear``, ``native_attention``, ``native_rows``, ``native_sampler`` (single kernels, which
run the same code as a forward pass and are tested against the reference), ``native_forward``,
``shared_ranks`` (sums over the ranks of a model on one machine).
"""
