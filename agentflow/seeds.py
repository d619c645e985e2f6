"""Seeds of generations that name none: they follow from where the generation stands."""

from __future__ import annotations

import hashlib


def derived_seed(run: str, place: str) -> int:
    """``run``: the session's seed and the run's index; ``place``: the state's path in the fork tree and the
    gen's number in the state. The same places draw the same, in a replay and in a compiled graph."""
    digest = hashlib.blake2b(f"{run}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
