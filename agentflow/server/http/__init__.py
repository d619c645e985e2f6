"""HTTP: connections, requests and routes.

``acceptor`` accepts connections, and ``protocol`` reads requests from them, within limits; it parses one at a
time, for which ``request_ends`` finds where each ends. ``json_body`` decodes a request's body, for which
``normalized_json`` accepts more spellings, ``caller`` reads the headers with its place in a program, and
``call`` runs the request. ``forwarded`` answers requests of other servers with the same store, and ``route``
declares a path.
"""
