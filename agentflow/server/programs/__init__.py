"""Programs that live in the server between the requests of their clients.

``program`` has one program: its variables, its requests and the interpreter that runs them. ``programs`` owns
the tasks of all programs, and ``shared_values`` has the values that survive a server.
"""
