"""Backends by their addresses: ``api_address`` reads an address, ``asked_server`` asks a server what it is,
and ``environment_key`` finds the key in the environment.
"""
