"""The engine on the event loop's side, as the interpreter and the HTTP APIs use it.

Read ``generator`` (the ``Generator`` on a running engine), ``context`` (a state's content, and its
encoded part) and ``requests`` (from a state to a request: gate, images, encoding). ``select`` scores choices,
``decide`` the answers to questions about a state, and ``embedding`` makes embeddings. ``ahead`` computes
tokens before the next requests need them, and ``prompt_changes`` finds why a conversation's prompt changed.
"""
