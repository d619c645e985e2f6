"""Forward passes over tokens of many requests, from packed weights and a batch to hidden states and logits.

``fused_decoder`` computes the Llama shape, on a GPU with ``decode_graphs``; ``decoder`` computes all other
families. ``latent_attention`` is the attention of DeepSeek-V2, and ``adapted_products`` adds what LoRA
adapters change.
"""
