"""From the files of a model to the packed weights of its forward pass.

``loader`` packs one matrix after another. ``row_order`` reorders the rows of queries, keys and values.
``checkpoint`` reads tensors by name, from safetensors or GGUF. ``cuts`` selects the part of each tensor that
a process reads, if the model is divided over processes. ``packed_checkpoint`` reads quantised matrices (AWQ,
GPTQ, compressed-tensors, fp8 and MXFP4; the formulas are in ``packed_matrices``), and ``quantising`` rounds
dense ones.
"""
