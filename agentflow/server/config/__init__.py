"""The configuration of a server.

``limits`` declares limits on the structs that use them, ``api_address`` reads the addresses of models behind
an API, ``schema`` derives all settings from such structs, and ``config`` loads them from flags,
environment variables and a TOML file, and prints them.
"""
