"""Chains that run as one program.

A run walks through the chain. A model call is sent to the backend without waiting for its answer; its value
is a ``Pending``, which a prompt template puts into the next prompt as a reference. The walk waits only where
a part of the chain must run in this process, and at the end. It is written once, as coroutines, and has two
drivers.

Reading order: ``wired_chain`` is the interface, ``parts`` tells which parts of a chain are wired, ``values``
are what a walk passes between them, ``walk`` is one run, and ``driver`` runs its coroutines.
"""
