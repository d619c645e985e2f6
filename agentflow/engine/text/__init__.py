"""Text and token ids: tokenizer, chat template, tools, and where generated text ends.

Read ``tokenizer_files`` and ``tokenizer``; ``chat_template`` (renders conversations) and ``chat_layout``
(separates contents from markup in a rendering); ``token_state`` (a state's text as token ids) with ``parts``
(its turns), ``laid_out`` (their places in a rendering), ``spans`` (the units that are encoded),
``rendered_prefixes`` (the tokens of texts that clients send back) and ``choices`` (a select's choices);
``turn_ends`` (which tokens end an answer) and ``detokenizer`` (generated text and stops); ``tool_format``,
``tool_output`` and ``tools`` (tool calls: notation, parsing, use); ``reasoning`` (the reasoning before an
answer), and ``channels`` with ``channel_output`` (models that write in channels).
"""
