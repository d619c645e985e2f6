"""HTTP: connections, requests and routes.

``acceptor`` accepts connections, and ``protocol`` reads requests from them, within limits. ``call`` runs one
request, for which ``whole_numbers`` reads integers that are written as floats. ``route`` declares a path.
"""
