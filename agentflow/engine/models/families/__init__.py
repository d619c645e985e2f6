"""The architectures that run natively, one file a family.

``family`` has what families share; ``registry`` finds one by the name in ``config.json``. A family reads its
shape from the config and names its weights; ``decoder`` computes it.
"""
