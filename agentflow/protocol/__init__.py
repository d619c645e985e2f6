"""The vocabulary that programs, the wire and the engine share.

``sampling``, ``constraint``, ``transform`` and ``chat`` are the parameters of generations; ``ops`` and
``events`` go to a backend and come back; ``op_table`` has the properties of each op. ``backend`` is the
interface of backends, ``wire`` the frames of the websocket protocol, ``json_bounds`` guards against hostile
JSON, and ``schema_walk`` walks through JSON schemas. ``record`` is the base of records that programs show as
JSON."""
