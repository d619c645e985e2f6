"""The answer of a model behind an API.

``answer`` collects it while it is streamed, ``visible_text`` applies the stops, ``verification`` checks it
against a constraint, ``selection`` scores choices, and ``reported_usage`` reads the numbers of tokens.
``stream_reader`` has the parts that the readers of all APIs' streams share.
"""
