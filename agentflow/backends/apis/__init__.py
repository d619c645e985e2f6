"""Models behind HTTP APIs: OpenAI, Anthropic and compatible servers.

Reading order: ``openai``, ``anthropic``, ``compatible`` and ``asked_server`` are the backends, ``serving``
opens them, ``addresses`` finds them by an address, and ``environment_key`` finds their key. ``generator`` is
their ``Generator``: it sends a ``conversation`` in an ``api_format`` (``chat``, ``responses``, ``messages``)
over ``http``, and collects ``answers``. ``decisions`` answers questions about a state, ``embeddings`` serves
``flow.embed``, and ``fallback`` asks several models in turn. ``speculation`` keeps the text of a call for
several gens, ``prefix_gate`` lets the first branch of a fork go ahead, and ``hedging`` makes a slow call a
second time. ``batches`` sends the requests of a map in batches of the vendor. ``capability_table`` has the
features of models, ``strict_schema`` the schemas that OpenAI enforces, and ``prices`` the costs.
"""
