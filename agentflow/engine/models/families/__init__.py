"""The architectures that run natively. A file has one family, or several similar ones.

``family`` has the common parts; ``registry`` finds a family by the name in ``config.json``. A family reads
its shape from the config and lists the names of its weights; ``forward/decoder`` computes it.
Families: ``llama`` (with Mistral, Qwen, Granite, …), ``mixture`` (mixtures of experts), ``gemma``, ``phi``,
``olmo`` (and others with norms after the blocks), ``glm``, ``deepseek``, ``parallel_blocks`` (attention and
MLP of the same residual: GPT-NeoX, Falcon, StableLM, Command R), ``gpt2`` (and others with learned
positions), ``starcoder``, and ``image_text`` (models that read images: Idefics3, LLaVA, Qwen-VL).
"""
