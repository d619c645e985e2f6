"""Seeds of generations that name none: they follow from where the generation stands."""

from __future__ import annotations

import hashlib


def run_of(session_seed: int, index: int) -> str:
    """The first part of what a seed is derived from: the session's seed and the run's index."""
    return f"{session_seed}/{index}"


def place_of(path: tuple[int, ...], number: int) -> str:
    """The second part: the state's path in the fork tree, and the gen's number in the state."""
    return f"{path}/{number}"


def derived_seed(run: str, place: str) -> int:
    """``run`` and ``place``: from ``run_of`` and ``place_of``. The same places draw the same, in a replay and
    in a compiled graph."""
    digest = hashlib.blake2b(f"{run}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
