"""The choice of tokens from logits.

Reading order: ``sampler`` (the interface), ``no_choice`` (the results for rows without a valid token),
``token_weights`` (the integer weights with which all implementations draw), ``torch_sampler`` (any device).
"""
