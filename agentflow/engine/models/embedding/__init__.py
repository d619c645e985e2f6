"""Embeddings: ``pooling`` makes one vector of a text's hidden states, and ``encoder_runner`` runs models that
read a whole text at once.
"""
