"""Forward passes over tokens of many requests, from packed weights and a batch to hidden states and logits.

``decoder`` computes all families, in one call of the native kernels or kernel by kernel, on a GPU with
``decode_graphs``. ``latent_attention`` is the attention of DeepSeek-V2, ``experts_in_turn`` computes mixtures
of experts that the kernels cannot group, and ``adapted_products`` adds the changes of LoRA adapters.
"""
