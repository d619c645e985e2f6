"""A replica's reports over a network that loses, repeats and reorders them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentflow.cluster.routing.feed import Feed, Follower, Update
from agentflow.cluster.routing.prefix_tree import PrefixTree
from agentflow.engine.cache.radix_cache import RadixCache

STEMS = st.sampled_from([10, 64, 100, 200])


def tokens(stem: int, own: int, length: int) -> bytes:
    """A shared beginning, then tokens that differ for each ``own``."""
    return np.concatenate((np.zeros(stem), np.full(length, own))).astype(np.int32).tobytes()


class Replica:
    """A cache with its feed."""

    def __init__(self, number: int, epoch: int) -> None:
        self.feed = Feed(number, epoch)
        self.cache = RadixCache(model="m", on_blocks=self.feed.on_blocks)
        self.slots = itertools.count()

    def compute(self, run: bytes) -> None:
        slots = np.array([next(self.slots) for _ in range(len(run) // 4)], dtype=np.int32)
        self.cache.extend(self.cache.match("", b""), "", run, slots)

    def snapshot(self) -> Update:
        return self.feed.snapshot(self.cache.stored_blocks())


def contents(tree: PrefixTree) -> list[tuple[bytes, list[tuple[int, int]]]]:
    """The tokens that each replica holds of each edge."""
    return sorted((edge.run, sorted(edge.held.items())) for edge in tree.edges() if edge.held)


@given(data=st.data())
def test_the_tree_becomes_right_whatever_happens_to_messages(data: st.DataObject) -> None:
    tree = PrefixTree("m")
    replicas = [Replica(number, 0) for number in range(2)]
    followers = [Follower(tree, number) for number in range(2)]
    network: list[Update] = []
    epochs = itertools.count(1)
    for _ in range(data.draw(st.integers(15, 40))):
        number = data.draw(st.integers(0, 1))
        replica = replicas[number]
        match data.draw(
            st.sampled_from(["compute", "evict", "send", "deliver", "lose", "repeat", "restart", "forget"])
        ):
            case "compute":
                stem, own = data.draw(STEMS), data.draw(st.integers(1, 3))
                replica.compute(tokens(stem, own, data.draw(STEMS)))
            case "evict":
                replica.cache.evict(data.draw(st.integers(1, 300)))
            case "send":
                update = replica.feed.flush()
                network += [] if update is None else [update]
            case "deliver" | "repeat" | "lose" as action if network:
                place = data.draw(st.integers(0, len(network) - 1))
                update = network[place] if action == "repeat" else network.pop(place)
                if action != "lose" and not followers[update.replica].receive(update):
                    network.append(replicas[update.replica].snapshot())
            case "restart":
                replicas[number] = Replica(number, next(epochs))
            case "forget":  # the router starts again, and the replicas go on
                tree = PrefixTree("m")
                followers = [Follower(tree, number) for number in range(2)]
            case _:
                pass
        tree.check()
    for number, (replica, follower) in enumerate(zip(replicas, followers, strict=True)):
        replica.compute(tokens(64, 9, 64))  # an update that shows the gap, if there is one
        update = replica.feed.flush()
        assert update is not None
        if not follower.receive(update):
            assert follower.receive(replica.snapshot())
        alone = PrefixTree("m")
        for stored in replica.cache.stored_blocks():
            assert alone.store(number, stored)
        for run in [tokens(stem, own, 200) for stem in (10, 64, 100, 200) for own in (1, 2, 3, 9)]:
            assert tree.match("", run).hits.get(number, 0) == alone.match("", run).hits.get(number, 0)
    tree.check()


def test_a_gap_is_found_and_closed_by_a_snapshot() -> None:
    tree, replica = PrefixTree("m"), Replica(0, 0)
    follower = Follower(tree, 0)
    replica.compute(tokens(0, 1, 128))
    assert replica.feed.flush() is not None  # lost
    replica.compute(tokens(0, 2, 128))
    update = replica.feed.flush()
    assert update is not None
    assert not follower.receive(update)
    assert tree.match("", tokens(0, 2, 128)).hits == {}
    assert follower.receive(replica.snapshot())
    assert tree.match("", tokens(0, 1, 128)).hits == tree.match("", tokens(0, 2, 128)).hits == {0: 128}
    assert follower.receive(update)  # it came before the snapshot was made
    assert tree.match("", tokens(0, 2, 128)).hits == {0: 128}


def test_messages_of_a_process_that_is_gone_are_ignored() -> None:
    tree, old, new = PrefixTree("m"), Replica(0, 1), Replica(0, 2)
    follower = Follower(tree, 0)
    for replica, own in ((old, 1), (new, 2)):
        replica.compute(tokens(0, own, 128))
    of_old, of_new = old.feed.flush(), new.feed.flush()
    assert of_old is not None
    assert of_new is not None
    assert follower.receive(of_new)
    assert follower.receive(of_old)
    assert tree.match("", tokens(0, 1, 128)).hits == {}
    assert tree.match("", tokens(0, 2, 128)).hits == {0: 128}
