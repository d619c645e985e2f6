"""Forward passes over tokens of many requests, from packed weights and a batch to hidden states and logits.

``llama`` is that of the Llama shape, ``decoder`` that of every other family. ``latent_attention`` is the
attention of DeepSeek-V2, and ``adapted_products`` adds what LoRA adapters change.
"""
