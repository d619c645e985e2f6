"""The engine on the event loop's side, as the interpreter and the HTTP APIs use it.

Read ``generator`` (the ``Generator`` on a running engine), ``context`` (a state's content, and what of it is
encoded), ``media`` (reads images before that) and ``embedding`` (the batches of an embedding request).
``select`` scores choices, and ``decide`` the answers to questions about a state.
``prompt_changes`` finds why a conversation's prompt changed.
"""
