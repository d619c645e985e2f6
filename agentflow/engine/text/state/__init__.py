"""A program's state as token ids.

Read ``token_state``. ``parts`` has the turns of a state, ``laid_out`` their places in a rendering of the chat
template, and ``encoding`` divides them into ``text_spans`` and encodes these. ``rendered_prefixes`` keeps the
tokens of texts that clients send back, and ``choices`` encodes a select's choices.
"""
