"""From the files of a model to the packed weights of its forward pass.

``loader`` packs matrix after matrix, and ``row_order`` has the order of the rows of queries, keys and
values; ``checkpoint`` reads tensors by name, from safetensors or GGUF, and ``cuts`` has the part of each, if
the model is divided over processes;
``packed_checkpoint`` reads matrices that are quantised already (AWQ, GPTQ, compressed-tensors, fp8 and MXFP4;
the formulas are in ``packed_matrices``), and ``quantising`` rounds those that are not.
"""
