"""The ``Generator`` of models behind APIs.

Reading order: ``conversation`` is a state, and ``api_format`` the interface to the kinds of APIs. ``calls``
makes a call, which ``hedging`` may make a second time, and before which ``prefix_gate`` lets the first branch
of a fork go ahead. ``generator`` runs the ops of programs on calls; ``context_operations`` has the ops that
need no call. ``speculation`` keeps the text of a call for several gens, ``decisions`` answers questions about
a state, and ``embeddings`` serves ``flow.embed``, both by ``posted_calls``.
"""
