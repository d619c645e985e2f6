"""Backends by their addresses: ``api_address`` reads an address, ``asked_server`` asks a server for its kind,
and ``environment_key`` finds the key in the environment.
"""
