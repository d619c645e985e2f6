"""Programs that live on in the server, without a connection.

``program`` has one program: its variables, its requests and the interpreter that runs them. ``programs`` owns
the tasks of all programs, and ``shared_values`` has the values that survive a server.
"""
