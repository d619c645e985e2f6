"""Prompts that begin with the same text around the same variable compute it once, also while the variable has
no value: they become ready in the same turn of the event loop, and the scheduler computes the prefix that
waiting requests share for one of them."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine

import agentflow as af

pytestmark = pytest.mark.anyio

RULES = "The rules of the house are read to all guests before they take their rooms. " * 2
NUM_READERS = 8
MOST_OF_A_READER = 4
"""Tokens that a reader computes for itself: its end, its answer, and the last token of the text before the
variable, which a request computes even if the cache has all of it."""


async def num_computed(num_readers: int, *, is_known: bool, token_budget: int) -> int:
    """The tokens that the engine computes if separate programs read one variable between equal texts."""
    engine = FakeEngine(token_budget=token_budget)
    async with af.session(backend=engine) as flow, flow.state() as s:
        s += "Name: " + af.gen("name", max_tokens=20, min_tokens=20)
        if is_known:
            await s["name"]
        readers = [flow.state() for _ in range(num_readers)]
        for number, reader in enumerate(readers):
            reader += f"{RULES}{s['name']}{RULES}{number}" + af.gen("answer", max_tokens=1)
        for reader in readers:
            await reader["answer"]
        return (await flow.stats()).computed_tokens


@pytest.mark.parametrize("is_known", [False, True], ids=["unfinished", "known"])
@pytest.mark.parametrize("token_budget", [64, 2048], ids=["in-chunks", "in-one-step"])
async def test_equal_text_around_the_same_variable_is_computed_once(
    is_known: bool, token_budget: int
) -> None:
    alone = await num_computed(1, is_known=is_known, token_budget=token_budget)
    together = await num_computed(NUM_READERS, is_known=is_known, token_budget=token_budget)
    assert alone > 5 * NUM_READERS * MOST_OF_A_READER
    assert together <= alone + (NUM_READERS - 1) * MOST_OF_A_READER
