"""GGUF files, unchanged: nothing is converted or written.

Read ``container`` (the format), ``tensors`` (a tensor in the torch model's layout), ``metadata``,
``architectures`` (config and names), ``vocabulary`` and ``tokenizer`` (to the object of a
``tokenizer.json``), ``names`` and ``mmproj`` (the vision tower, in a file next to the model), and ``file``
(all of it together).
"""
