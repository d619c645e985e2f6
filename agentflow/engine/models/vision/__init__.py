"""Vision towers: from the arrays of a prepared medium to the rows that replace embeddings in a prompt.

``encoder`` has the layers, ``pieces`` divides other work, ``tower`` is the interface of a tower, and
``encoding`` runs one in slices.
``weights`` takes tensors from checkpoints. The towers, a file for each kind: ``siglip`` (with CLIP) encodes
tiles, for ``idefics3``, ``gemma3`` and ``llava`` (with ``any_resolution``, which puts tiles together);
``qwen`` encodes images of any size. ``features`` keeps the results for a runner, and ``loading`` makes the
tower of a model folder.
"""
