"""HTTP: connections, requests, errors, and the routes of both APIs.

``acceptor`` accepts connections and ``protocol`` reads requests from them, within limits. ``origin_guard``
rejects pages of other sites. ``routes`` has the paths and ``openapi`` describes them. ``call`` runs one
request, ``events`` writes server-sent events, and ``errors`` has the status and code of each error.
``addresses`` knows loopback addresses.
"""
