"""Anthropic's messages.

``anthropic_messages`` writes requests, with ``cache_marks`` for the prompt cache, ``anthropic_stream`` reads
answers, and ``anthropic_schema`` narrows schemas to the ones that the API enforces.
"""
