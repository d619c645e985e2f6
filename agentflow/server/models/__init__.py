"""The models of a server.

``wait_limit`` rejects requests that would wait too long, ``request_spans`` traces requests, ``models`` finds
a model by its name, ``alias`` is a model under another name, ``api_model`` is a model behind an API, and
``open_models`` starts models from their options.
"""
