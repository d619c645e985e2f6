"""Vision towers: from the arrays of a prepared medium to the rows that replace embeddings in a prompt.

``encoder`` has the layers, ``pieces`` divides other work, ``tower`` is the interface of a tower, and
``encoding`` runs a tower in slices. ``weights`` reads tensors from checkpoints. Each kind of tower has a
file: ``siglip`` (with CLIP) encodes tiles, for ``idefics3``, ``gemma3`` and ``llava`` (with
``any_resolution``, which joins tiles); ``qwen`` encodes images of any size. ``features`` holds the results
for a runner, and ``loading`` loads the tower of a model folder.
"""
