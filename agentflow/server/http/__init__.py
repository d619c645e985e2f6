"""HTTP: connections, requests, and the routes of the APIs.

``acceptor`` accepts connections and ``protocol`` reads requests from them, within limits. ``origin_guard``
rejects pages of other sites. ``routes`` has the paths and ``openapi`` describes them. ``call`` runs one
request.
"""
