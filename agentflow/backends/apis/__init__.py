"""Models behind HTTP APIs: OpenAI, Anthropic and compatible servers.

Reading order: ``openai``, ``anthropic`` and ``compatible`` are the backends, ``serving`` opens them, and
``addresses`` finds them and their keys by an address. ``generation`` has their ``Generator``, whose calls are
written in a format (``chat``, ``responses``, ``messages``), sent over ``http``, and collected as ``answers``.
``grammars`` translates constraints into the notations of servers. ``fallback`` tries several models in turn,
and ``batches`` sends the requests of a map in batches of the vendor. ``capability_table`` has the features of
models, ``strict_schema`` the schemas that OpenAI enforces, and ``prices`` the costs.
"""
