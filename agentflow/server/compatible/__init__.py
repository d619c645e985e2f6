"""The parts of OpenAI's API that SGLang's and Ollama's have, too.

``fields`` has the types of fields and ``field_errors`` the errors that name them. ``sampling``, ``prompts``,
``functions``, ``images``, ``forms`` and ``cache_marks`` translate fields for the engine. ``logprobs`` and
``embeddings`` write parts of answers, and ``error_format`` whole errors.
"""
