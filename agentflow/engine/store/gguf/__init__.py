"""Reads GGUF files in place: nothing is converted or written.

Read ``container`` (the format), ``tensors`` (a tensor in the torch model's layout), ``metadata``,
``architectures`` (config and names), ``vocabulary`` and ``tokenizer`` (the object of a ``tokenizer.json``),
``names`` and ``mmproj`` (the vision tower, in a file next to the model), and ``file`` (joins all of them).
"""
