"""From a decoded image to the arrays and the pieces of one model, a file for each family.

Shared are ``pixels`` (resizing, cutting, settings, the interface) and ``anyres`` (tiles of any resolution).
The families: ``idefics3``, ``llava``, ``llava_next``, ``llava_onevision``, ``gemma3``, ``qwen_vl``.
``registry`` finds the processor of a model.

Each class documents its arrays. ``pixels`` are bytes, with the values that the image processors of
transformers on Pillow have before they scale them (``settings.PixelScaling``). Runs of a medium follow each
other in its features: the first row of each is the sum of the tokens before it.
"""
