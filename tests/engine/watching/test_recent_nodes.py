"""The recently used part of the radix trees: closed under parents, bounded, the most recent first, and
complete where it can be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.engine.cache import radix_cache
from agentflow.engine.cache.nodes import Node
from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.cache.token_run import token_run
from agentflow.engine.watching.recent_nodes import recent_nodes

OWNERS = ["ann", "bob"]
SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=8)


class Used:
    """A cache after random use."""

    def __init__(self) -> None:
        self.cache = RadixCache(lambda key: key[0])
        self.num_slots = 0

    def insert(self, owner: str, salt: int, sequence: list[int]) -> None:
        key = (owner, salt)
        run = token_run(np.array(sequence, dtype=np.int32))
        match = self.cache.match(key, run)
        self.cache.lock(match)
        slots = np.arange(self.num_slots, self.num_slots + len(sequence), dtype=np.int32)
        self.num_slots += len(sequence)
        new, _ = self.cache.extend(match, key, run, slots)
        self.cache.move_lock(match, new)
        self.cache.unlock(new)

    def nodes(self, owner: str | None) -> list[Node]:
        return [node for node in self.cache.nodes() if owner is None or node.account.owner == owner]


USES = st.lists(
    st.tuples(st.sampled_from(OWNERS), st.integers(0, 1), SEQUENCES) | st.integers(1, 6), max_size=30
)


def used(uses: list[tuple[str, int, list[int]] | int]) -> Used:
    made = Used()
    for use in uses:
        if isinstance(use, int):
            made.cache.evict(use)
        else:
            made.insert(*use)
    made.cache.check()
    return made


@given(USES, st.integers(1, 12), st.sampled_from([None, *OWNERS, "carl"]))
def test_recent_nodes_are_the_last_used_part_of_the_owners_cache(
    uses: list[tuple[str, int, list[int]] | int], most: int, owner: str | None
) -> None:
    made = used(uses)
    everything = made.nodes(owner)
    found = recent_nodes(made.cache, most, owner)
    assert len(set(found)) == len(found) == min(most, len(everything))
    assert set(found) <= set(everything)
    seen: set[Node | None] = set()
    for node in found:
        assert node.parent is not None
        assert node.parent.parent is None or node.parent in seen
        seen.add(node)
    parents = {node.parent for node in found}
    ends = [node.last_access for node in found if node not in parents]
    left_out = [node.last_access for node in everything if node not in seen]
    if ends and left_out:
        assert max(left_out) <= min(ends)


@given(USES)
def test_numbers_are_never_reused(uses: list[tuple[str, int, list[int]] | int]) -> None:
    made = Used()
    numbers: dict[int, Node] = {}
    for use in uses:
        if isinstance(use, int):
            made.cache.evict(use)
        else:
            made.insert(*use)
        for node in made.cache.nodes():
            assert numbers.setdefault(node.number, node) is node


@pytest.mark.parametrize("num_remembered", [0, 3])
@given(USES, st.sampled_from([None, *OWNERS]))
def test_a_small_tree_is_complete_even_if_its_use_is_forgotten(
    num_remembered: int, uses: list[tuple[str, int, list[int]] | int], owner: str | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(radix_cache, "MAX_RECENT", num_remembered)
        made = used(uses)
        assert len(made.cache.recent) <= num_remembered
        everything = made.nodes(owner)
        assert set(recent_nodes(made.cache, max(1, len(everything)), owner)) == set(everything)


def test_the_work_is_bounded_where_a_node_has_very_many_children() -> None:
    made = Used()
    for first in range(1000):
        made.insert("ann", 0, [first])
    made.cache.recent.clear()
    found = recent_nodes(made.cache, 10)
    assert [node.run for node in found] == [token_run(np.array([999 - i], dtype=np.int32)) for i in range(10)]
