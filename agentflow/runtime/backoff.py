"""Pauses between attempts: they double, with jitter if many clients may retry at the same time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

_chance = random.SystemRandom()  # programs seed the shared generator, and may compare its state


def doubled_s(first_s: float, most_s: float, num_failed: int) -> float:
    """The pause after ``num_failed`` failed attempts in a row, at least 1: ``first_s``, then doubled for each
    further failure, at most ``most_s``.

    >>> [doubled_s(0.5, 3.0, num_failed) for num_failed in (1, 2, 3, 4, 10_000)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """
    return min(most_s, first_s * 2.0 ** min(num_failed - 1, 32))


def spread(least: float, most: float) -> float:
    """Returns a random factor between ``least`` and ``most``, for pauses of clients that must not retry
    together."""
    return _chance.uniform(least, most)


def pauses_s(first_s: float, most_s: float) -> Iterator[float]:
    """The pauses before the attempts to reach a server: none before the first, then ``doubled_s``, each
    shortened by up to a half, so that clients that lost the server together come back at different times."""
    yield 0.0
    for num_failed in itertools.count(1):
        yield doubled_s(first_s, most_s, num_failed) * spread(0.5, 1.0)
