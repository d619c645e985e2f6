"""The choice of tokens from logits.

Reading order: ``sampler`` (the interface), ``no_choice`` (the results for rows from which no token can be
chosen), ``token_weights`` (the integers from which all implementations draw), ``torch_sampler`` (any
device).
"""
