"""Passages, questions about them, and vectors, for the examples of retrieval."""

from __future__ import annotations

import re
import zlib

import numpy as np
from numpy.typing import NDArray

PASSAGES = [
    "Bees collect nectar from flowers and turn it into honey. A bee colony has one queen.",
    "The lighthouse keeper lights the lamp at dusk and puts it out at dawn.",
    "Bread rises because yeast turns sugar into gas. The dough should rest for two hours.",
    "A glacier is a river of ice. It moves about one metre a day and carves valleys.",
    "Owls hunt at night. Their soft feathers let them fly without a sound.",
    "Salt was once so precious that soldiers were paid with it.",
    "A sundial shows the time by the shadow of a stick. It is of no use at night.",
    "Silk is made by a caterpillar that spins a thread one kilometre long.",
]
QUESTIONS = ["How do bees make honey?", "How fast does a glacier move?", "Why can owls fly without a sound?"]
SIZE = 1024


def embed(text: str) -> NDArray[np.float32]:
    """Returns a vector that counts the groups of three letters, each at the place of its hash."""
    vector = np.zeros(SIZE, dtype=np.float32)
    for word in re.findall(r"[a-z]{3,}", text.lower()):
        for start in range(len(word)):
            vector[zlib.crc32(f" {word} "[start : start + 3].encode()) % SIZE] += 1
    return vector
