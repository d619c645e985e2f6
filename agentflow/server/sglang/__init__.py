"""SGLang's native API: ``/generate``, and the descriptions of the model and the server.

``types`` has the JSON shapes, and ``answer`` has answers and the events of streams. ``generation`` is the
endpoint and the translation of its fields for the engine, ``models`` has the descriptions, and ``routes`` the
paths.
"""
