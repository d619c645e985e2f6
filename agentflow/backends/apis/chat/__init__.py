"""OpenAI's chat completions and completions, as vendors and servers implement them.

``chat_completions`` and ``completions`` write requests and read streams. ``flavours`` has the differences
between servers, ``sampling_fields`` the parameters of a request. ``gbnf`` and ``lark_grammar`` translate
patterns and grammars, and ``xgrammar_pattern`` writes patterns for vLLM and SGLang.
"""
