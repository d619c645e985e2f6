"""The parts of OpenAI's API that SGLang's and Ollama's share.

``fields`` has the types of fields, and ``field_errors`` adds the field to errors. ``sampling``, ``prompts``,
``functions``, ``images``, ``forms`` and ``cache_marks`` translate fields for the engine. ``logprobs`` and
``embeddings`` write parts of answers, and ``error_format`` whole errors.
"""
