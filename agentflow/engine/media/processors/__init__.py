"""From a decoded image to the arrays and pieces for one model, with a file for each family.

The families share ``pixels`` (resizing, cutting, settings, the interface) and ``anyres`` (tiles of any
resolution). They are ``idefics3``, ``llava``, ``llava_next``, ``llava_onevision``, ``gemma3`` and
``qwen_vl``. ``registry`` finds the processor of a model.

Each class documents its arrays. ``pixels`` are bytes, equal to the values in transformers' image processors
on Pillow before scaling (``settings.PixelScaling``). The features of a medium's runs follow each other: the
first row of a run is the number of tokens in the runs before it.
"""
