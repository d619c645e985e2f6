"""OpenAI's chat completions and completions, as vendors and servers implement them.

``chat_completions`` and ``completions`` write requests and read streams. ``flavours`` has the differences
between servers, and ``sampling_fields`` the parameters of a request.
"""
