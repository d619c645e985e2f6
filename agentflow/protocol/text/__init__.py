"""Reads generated text: ``transform`` transforms the value of a variable where it is used, ``text_parts``
finds items and values in it, and ``stop_pattern`` searches for the end of a growing text.
"""
