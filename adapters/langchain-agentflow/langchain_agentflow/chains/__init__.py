"""Chains that run as one program.

A run walks through the chain. A model call is sent to the backend without waiting for its answer; its value
is a ``Pending``, which a prompt template inserts into the next prompt as a reference. The walk waits only if
a part of the chain must run in this process, and at the end. It is written once, as coroutines, and has two
drivers.

Reading order: ``wired_chain`` is the interface, ``parts`` finds the parts of a chain that are wired,
``values`` has the values that a walk passes between them, ``walk`` is one run, and ``driver`` runs its
coroutines.
"""
