"""A program's state as token ids.

Read ``token_state``. ``parts`` has the turns of a state, ``laid_out`` their places in a rendering of the chat
template, and ``text_spans`` the pieces of text that are encoded together. ``rendered_prefixes`` keeps the
tokens of texts that clients send back, and ``choices`` encodes a select's choices.
"""
