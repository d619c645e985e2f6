"""Embeddings without a model: each word has a fixed random direction, and a text has the sum of its words.

Texts with common words are similar, in any order: enough to test programs with retrieval.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable


def word_embedding(words: Iterable[bytes], size: int) -> list[float]:
    """The embedding of these words: ``size`` dimensions, of length 1.

    >>> word_embedding([b"a", b"b"], 3) == word_embedding([b"b", b"a"], 3)
    True
    """
    total = [0] * size
    for word in words:
        digest = hashlib.shake_128(word).digest(size)
        for i in range(size):
            total[i] += 2 * digest[i] - 255
    length = math.sqrt(sum(value * value for value in total)) or 1.0
    return [value / length for value in total]
