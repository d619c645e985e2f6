"""The models of a server.

``models`` finds a model by its name and admits requests to it, ``request_spans`` traces them, and
``open_models`` starts models from their options.
"""
