"""Models behind HTTP APIs: OpenAI, Anthropic and compatible servers.

Reading order: ``openai``, ``anthropic`` and ``compatible`` are the backends, ``serving`` opens them, and
``asked_server`` asks a server what it is. ``generator`` is their ``Generator``: it sends a ``conversation``
through the ``transport``, as fast as ``pacing`` allows, in an ``api_format``, such as ``chat_completions`` or
``completions``, and collects an ``answer``.
``anthropic_messages`` writes the requests of Anthropic's API, with ``cache_marks``, and ``anthropic_stream``
reads its answers. ``flavours`` and ``sampling_fields`` have the differences between servers,
``capability_table`` the features of models, ``strict_schema`` and ``anthropic_schema`` the schemas that the
vendors enforce. ``selection`` scores choices, ``speculation`` keeps the text of a call for several gens,
``prefix_gate`` lets the first branch of a fork go ahead, ``event_stream`` reads server-sent events,
``visible_text`` applies stops, ``verification`` checks answers, ``api_errors`` explains refusals, and
``prices`` has the costs.
"""
