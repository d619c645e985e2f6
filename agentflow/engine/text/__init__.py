"""Text and token ids: tokenizer, chat template, tools, and where generated text ends.

Read ``tokenizer_files`` and ``tokenizer``; ``chat_template`` (renders conversations) and ``chat_layout``
(separates contents from markup in a rendering); ``state`` (a program's state as token ids), which compares
texts and ids by their ``common_prefix``; ``turn_ends`` (which tokens end an answer) and ``detokenizer``
(generated text and stops); ``tool_format``, ``tool_output`` and ``tools`` (tool calls: notation, parsing,
use); ``reasoning`` (the reasoning before an answer), and ``channels`` with ``channel_output`` (models that
write in channels).
"""
