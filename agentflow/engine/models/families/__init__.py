"""The architectures that run natively, one file a family.

``family`` has the common parts; ``registry`` finds one by the name in ``config.json``. A family reads its
shape from the config and names its weights; ``forward/decoder`` computes it.
Families: ``llama``, ``mixture``, ``gemma``, ``phi``, ``olmo``, ``gpt_oss``, ``deepseek``, ``starcoder``,
``gpt2``, ``gpt_neox``, ``stablelm`` and ``cohere``. With images (``image_text`` has their common parts):
``idefics3``, ``llava`` and ``qwen_vl``.
"""
