"""From the files of a model to the packed weights of its forward pass.

``loader`` packs matrix after matrix; ``checkpoint`` reads tensors by name, from safetensors or GGUF, and
``cuts`` says which part of each, if the model is divided over processes;
``packed`` reads checkpoints that are quantised already, and ``quantising`` rounds those that are not.
"""
