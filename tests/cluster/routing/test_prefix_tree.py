"""The router's tree against brute force: a plain list of each replica's blocks and prompts."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentflow.cluster.routing.prefix_tree import PrefixTree, RequestFamily
from agentflow.engine.cache.blocks import (
    BLOCK_TOKENS,
    BlocksRemoved,
    BlocksStored,
    chain_digests,
    root_digest,
)
from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.cache.token_run import common_prefix_len

REPLICAS = range(3)
KEYS = ("", "other tenant")

# Runs of one token each, so that sequences diverge at all places within a block.
sequences = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([1, 10, 30, 63, 64, 65, 130])), min_size=1, max_size=4
).map(lambda parts: np.repeat([t for t, _ in parts], [n for _, n in parts]).astype(np.int32).tobytes())


class Holdings:
    """The reference model of one replica: its blocks, each with all tokens up to its end, and its prompts."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[object, bytes]] = {}
        self.prompts: Counter[tuple[object, bytes]] = Counter()

    @property
    def in_progress(self) -> list[tuple[object, bytes]]:
        return sorted(self.prompts)

    def apply(self, report: BlocksStored | BlocksRemoved) -> None:
        if isinstance(report, BlocksRemoved):
            for digest in report.digests:
                del self.blocks[digest]
            return
        before = self.blocks[report.parent][1] if report.parent in self.blocks else b""
        for number, digest in enumerate(report.digests, 1):
            assert digest not in self.blocks
            self.blocks[digest] = report.cache_key, before + report.run[: 4 * BLOCK_TOKENS * number]

    def hit(self, key: object, run: bytes) -> int:
        held = [*self.blocks.values(), *self.prompts.elements()]
        return max((common_prefix_len(run, other) for its_key, other in held if its_key == key), default=0)


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree("m")
        self.holdings = [Holdings() for _ in REPLICAS]
        self.caches = [self.new_cache(replica) for replica in REPLICAS]
        self.slots = itertools.count()
        self.seen: list[tuple[str, bytes]] = []
        self.marked: dict[tuple[object, bytes], RequestFamily] = {}  # by the prompt that a family begins with

    def new_cache(self, replica: int) -> RadixCache:
        def on_blocks(report: BlocksStored | BlocksRemoved) -> None:
            self.holdings[replica].apply(report)
            if isinstance(report, BlocksStored):
                assert self.tree.store(replica, report)
            else:
                assert self.tree.remove(replica, report.digests)

        return RadixCache(model="m", on_blocks=on_blocks)

    @rule(replica=st.sampled_from(REPLICAS), key=st.sampled_from(KEYS), run=sequences)
    def computes(self, replica: int, key: str, run: bytes) -> None:
        cache = self.caches[replica]
        slots = np.array([next(self.slots) for _ in range(len(run) // 4)], dtype=np.int32)
        cache.extend(cache.match(key, b""), key, run, slots)
        self.seen.append((key, run))

    @rule(replica=st.sampled_from(REPLICAS), count=st.integers(1, 200))
    def evicts(self, replica: int, count: int) -> None:
        self.caches[replica].evict(count)

    @rule(replica=st.sampled_from(REPLICAS), key=st.sampled_from(KEYS), run=sequences)
    def begins(self, replica: int, key: str, run: bytes) -> None:
        self.tree.begin(replica, key, run)
        self.holdings[replica].prompts[key, run] += 1
        self.seen.append((key, run))

    @rule(replica=st.sampled_from(REPLICAS), data=st.data())
    def ends(self, replica: int, data: st.DataObject) -> None:
        prompts = self.holdings[replica].prompts
        if prompts:
            key, run = data.draw(st.sampled_from(sorted(prompts)))
            self.tree.end(replica, key, run)
            prompts[key, run] -= 1
            if not prompts[key, run]:
                del prompts[key, run]

    @rule(replica=st.sampled_from(REPLICAS), data=st.data())
    def begins_a_family(self, replica: int, data: st.DataObject) -> None:
        prompts = self.holdings[replica].in_progress
        if prompts:
            key, run = data.draw(st.sampled_from(prompts))
            self.marked[key, run] = RequestFamily(replica, 0.0, 0.0)
            self.tree.mark(key, run, self.marked[key, run])

    @rule(replica=st.sampled_from(REPLICAS))
    def is_lost(self, replica: int) -> None:
        self.tree.forget(replica)
        self.holdings[replica].blocks.clear()
        self.caches[replica] = self.new_cache(replica)

    @rule(key=st.sampled_from(KEYS), run=sequences)
    def matches(self, key: str, run: bytes) -> None:
        self.expect(key, run)

    def expect(self, key: str, run: bytes) -> None:
        hits = {replica: self.holdings[replica].hit(key, run) for replica in REPLICAS}
        match = self.tree.match(key, run)
        assert match.hits == {replica: hit for replica, hit in hits.items() if hit}
        # A prompt continues the family of each one in progress that it begins with; the longest counts.
        in_progress = {prompt for one in self.holdings for prompt in one.prompts}
        known = [prompt for prompt in self.marked.keys() & in_progress if run.startswith(prompt[1])]
        least = max((len(begin) for its_key, begin in known if its_key == key), default=0)
        if least:
            found = next(prompt for prompt, family in self.marked.items() if family is match.family)
            assert found[0] == key
            assert len(found[1]) >= least

    @invariant()
    def is_sound(self) -> None:
        self.tree.check()
        assert self.tree.num_blocks == len({digest for one in self.holdings for digest in one.blocks})
        for key, run in self.seen[-4:]:
            self.expect(key, run)


TestTree = TreeMachine.TestCase


def blocks_of(run: bytes, parent: bytes = root_digest("m", "")) -> BlocksStored:
    return BlocksStored("", parent, chain_digests(parent, run), run)


def tokens(*values: int) -> bytes:
    """A block of each value."""
    return np.repeat(values, BLOCK_TOKENS).astype(np.int32).tobytes()


def test_blocks_after_a_report_that_was_missed_are_not_added() -> None:
    tree, stored = PrefixTree("m"), blocks_of(tokens(1, 2, 3))
    later = BlocksStored("", stored.digests[0], stored.digests[1:], tokens(2, 3))
    assert not tree.store(0, later)
    tree.store(1, stored)
    assert not tree.store(0, later)
    assert tree.match("", tokens(1, 2, 3)).hits == {1: 3 * BLOCK_TOKENS}
    tree.check()


def test_removed_blocks_that_were_not_reported_are_found() -> None:
    tree, stored = PrefixTree("m"), blocks_of(tokens(1, 2, 3))
    tree.store(0, stored)
    assert not tree.remove(1, stored.digests[2:])
    assert not tree.remove(0, stored.digests[:1])  # the blocks after it are still there
    assert tree.match("", tokens(1, 2, 3)).hits == {0: 3 * BLOCK_TOKENS}
    assert tree.remove(0, stored.digests)
    assert not tree.remove(0, stored.digests)
    assert list(tree.edges()) == []


def test_blocks_that_are_reported_again_count_once() -> None:
    tree, stored = PrefixTree("m"), blocks_of(tokens(1, 2))
    assert tree.store(0, stored)
    assert tree.store(0, stored)
    assert tree.num_blocks == 2
    assert tree.remove(0, stored.digests)
    assert tree.num_blocks == 0


def test_the_rest_of_an_evicted_prompt_begins_no_family() -> None:
    tree = PrefixTree("m")
    shared, own = tokens(1, 2), tokens(3)
    root = blocks_of(shared + own)
    tree.begin(0, "", shared + own)
    tree.mark("", shared + own, family := RequestFamily(0, 0.0, 0.0))
    assert tree.store(0, root)
    tree.end(0, "", shared + own)
    assert tree.match("", shared + own + tokens(4)).family is family
    assert tree.match("", shared + tokens(4)).family is None
    assert tree.remove(0, root.digests[2:])
    assert tree.match("", shared + own + tokens(4)).family is None
