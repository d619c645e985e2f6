"""The responses and conversations that the server keeps between requests.

``item`` is one item of a conversation. ``background`` runs responses that need no connection, and ``store``
keeps responses and conversations for later turns. ``keeping`` is the interface of stores for one front or
several, and ``shared_store`` is a store in Redis.
"""
