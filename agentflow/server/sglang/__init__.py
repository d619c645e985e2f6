"""SGLang's native API: ``/generate``, and the descriptions of the model and the server.

``types`` has the JSON shapes, ``generation`` the endpoint and the translation of its fields for the engine,
``answer`` has answers and the events of streams, and ``models`` the descriptions.
"""
