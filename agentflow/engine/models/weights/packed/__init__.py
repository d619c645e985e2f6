"""Safetensors whose matrices are quantised: AWQ, GPTQ, compressed-tensors, fp8 and MXFP4.

``matrices`` has the formulas of the formats, and ``source`` finds the tensors of each matrix in a folder.
"""
