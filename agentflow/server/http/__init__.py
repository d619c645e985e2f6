"""HTTP: connections, requests and routes.

``acceptor`` accepts connections, and ``protocol`` reads requests from them, within limits. ``call`` runs one
request, for which ``whole_numbers`` reads integers that are written as floats, and ``caller`` the headers
with its place in a program. ``forwarded`` answers requests of other servers with the same store, and
``route`` declares a path.
"""
