"""The architectures that run natively: a file has one family, or several that share an idea.

``family`` has the common parts; ``registry`` finds a family by the name in ``config.json``. A family reads
its shape from the config and names its weights; ``forward/decoder`` computes it.
Families: ``llama`` (with Mistral, Qwen, Granite, …), ``mixture`` (of experts), ``gemma``, ``phi``, ``olmo``
(and others with norms after the blocks), ``glm``, ``deepseek``, ``parallel_blocks`` (attention and MLP of the
same residual: GPT-NeoX, Falcon, StableLM, Command R), ``gpt2`` (and others with learned positions),
``starcoder``, and those with images, ``image_text`` (Idefics3, LLaVA, Qwen-VL).
"""
