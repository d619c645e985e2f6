"""The definitions that the frontend, the wire and the engine share.

Reading order: ``ops`` has the operations of programs, ``events`` the answers of backends, and ``backend`` the
interface between them. ``op_table`` lists the properties of each op. ``sampling``, ``constraint`` and
``chat`` have the parameters of generations, ``text`` reads the generated text, and ``decisions`` has the
questions of a decide. ``grammars`` has grammars as trees, and ``images`` has the images of a conversation.
``wire`` has the frames of the websocket protocol, ``batches`` is the interface between maps and the batches
of vendors, and ``record`` is the base of records that programs show as JSON. ``schemas`` reads and rewrites
JSON schemas, ``bounds`` limits the input of clients, ``growing_text`` has texts that arrive in parts, and
``unreadable`` has the errors of data that cannot be decoded.
"""
