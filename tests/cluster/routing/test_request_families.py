"""Requests that continue others: how many each replica expects, and where families begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.cluster.routing.load import EngineShape, RoutedRequest
from agentflow.cluster.routing.prefix_tree import Match, RequestFamily
from agentflow.cluster.routing.request_families import (
    KNOWN_FAMILIES,
    REMEMBERED,
    RequestFamilies,
    begins_family,
)
from agentflow.cluster.routing.router import Router
from agentflow.engine.simulator.cost_model import CostModel

COST = CostModel(base_s=5e-3, row_s=2e-5, logits_s=0.0, read_s=2e-8, pair_s=0.0)
SHAPE = EngineShape(COST, max_running=64, kv_tokens=500_000)


@dataclass
class Reference:
    """The same with a list of all requests, for families that are never too old."""

    kinds: list[bool] = field(default_factory=list)  # whether each request began a family
    ages: list[float] = field(default_factory=list)
    promised: list[tuple[int, float]] = field(default_factory=list)  # by family: its replica, its requests

    def followers(self) -> float:
        keep = [(1 - 1 / REMEMBERED) ** age for age in range(len(self.kinds))][::-1]
        begun = sum(weight for weight, begins in zip(keep, self.kinds, strict=True) if begins)
        return sum(weight for weight, begins in zip(keep, self.kinds, strict=True) if not begins) / begun


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 20)), max_size=60))
def test_expected_requests_are_those_that_families_have_not_brought(
    steps: list[tuple[int, bool, int]],
) -> None:
    families, reference = RequestFamilies(), Reference()
    for replica in range(3):
        families.add(replica)
    begun: list[RequestFamily] = []
    for replica, begins, which in steps:
        if begins or not begun:
            begun.append(families.began("kind", replica, 0.0))
            reference.kinds.append(True)
            reference.promised.append((replica, reference.followers()))
        else:
            families.continued(begun[which % len(begun)], 0.0)
            reference.kinds.append(False)
            place, number = reference.promised[which % len(begun)]
            reference.promised[which % len(begun)] = place, max(0.0, number - 1)
        assert families.num_followers("kind") == pytest.approx(reference.followers())
    for replica in range(3):
        expected = sum(number for place, number in reference.promised if place == replica)
        assert families._expected[replica] == pytest.approx(expected, abs=1e-6)


def test_old_families_are_expected_to_bring_less() -> None:
    families = RequestFamilies()
    families.add(0)
    families.add(1)
    first = families.began("kind", 0, 0.0)
    for number in range(4):
        families.continued(first, 1.0 + number)
    families.ended(1.0, 0.1)
    families.began("kind", 0, 5.0)
    families.began("kind", 1, 5.0)
    sooner, later = families.delay_s("kind", 2, 5.0), families.delay_s("kind", 2, 50.0)
    assert sooner is not None
    assert later is not None
    assert sooner[0] > sooner[1] > later[1] > 0
    assert sooner[0] / sooner[1] == pytest.approx(later[0] / later[1])


def test_kinds_differ_in_what_continues_them() -> None:
    families = RequestFamilies()
    families.add(0)
    for number in range(KNOWN_FAMILIES + 1):
        families.began("alone", 0, float(number))
        family = families.began("long", 0, float(number))
        for _ in range(4):
            families.continued(family, number + 1.0)
    families.ended(1.0, 0.1)
    assert families.num_followers("long") == pytest.approx(4, rel=0.01)
    assert families.num_followers("new") == pytest.approx(2, rel=0.02)
    families.began("long", 0, 10.0)
    assert families.delay_s("alone", 1, 10.0) is None
    assert families.delay_s("long", 1, 10.0) is not None


@pytest.mark.parametrize(
    ("hits", "begins"),
    [
        ({}, True),
        ({0: 490}, True),  # less than half of it
        ({0: 990}, False),
        ({0: 990, 1: 300}, False),
        ({0: 600, 1: 600, 2: 600}, True),  # a system message that most replicas hold
        ({0: 600, 1: 600}, False),
        ({0: 990, 1: 480, 2: 480, 3: 480}, False),
    ],
)
def test_a_family_begins_where_no_prefix_ties_a_request_to_few_replicas(
    hits: dict[int, int], begins: bool
) -> None:
    assert begins_family(Match(hits, 0), 1000, 4) is begins
    assert not begins_family(Match(hits, 0, RequestFamily(0, 0.0, 0.0)), 1000, 4)


def sequence(number: int, length: int) -> bytes:
    return np.random.default_rng(number).integers(0, 2**31 - 1, length, dtype=np.int32).tobytes()


class Conversations:
    """Runs turns one after the other, each for a second. Everything that was sent stays in the caches."""

    def __init__(self, num_replicas: int) -> None:
        self.router = Router(SHAPE, "m")
        for replica in range(num_replicas):
            self.router.add(replica)
        self.now_s = 0.0
        self.sent: list[RoutedRequest] = []

    def turn(self, run: bytes, barred: Sequence[int] = ()) -> int:
        call = RoutedRequest(len(self.sent), "key", run, barred=barred)
        self.router.place([call], self.now_s)
        self.sent.append(call)
        self.router.tree.begin(call.replica, "key", run)  # it stays
        self.router.started(call, self.now_s)
        self.now_s += 1.0
        self.router.ended(call, 20, self.now_s)
        return call.replica


def test_a_conversation_begins_where_fewer_have_just_begun() -> None:
    cluster = Conversations(3)
    for number in range(4):  # it learns that conversations have four turns
        run = sequence(number, 600)
        replica = cluster.turn(run)
        for turn in range(3):
            run += sequence(100 + 10 * number + turn, 100)
            assert cluster.turn(run) == replica
    assert cluster.router.families.num_followers("kind") == pytest.approx(3, rel=0.01)
    for number, replica in enumerate((0, 0, 0, 1)):  # they pause now: no replica has any load
        cluster.turn(sequence(50 + number, 600), barred=[one for one in range(3) if one != replica])
    expected = cluster.router.families._expected[:3].tolist()
    assert expected[0] > expected[1] > expected[2]
    assert cluster.turn(sequence(60, 600)) == 2
    assert cluster.turn(sequence(61, 600), barred=[2]) == 1


def test_requests_that_continue_nothing_are_placed_by_load_alone() -> None:
    cluster = Conversations(2)
    for number in range(20):
        cluster.turn(sequence(number, 600))
    assert cluster.router.families.num_followers("kind") == 0
    assert cluster.router.families.delay_s("kind", 2, cluster.now_s) is None


def test_the_members_of_a_group_continue_what_they_share() -> None:
    cluster = Conversations(1)
    shared = sequence(1, 800)
    members = [RoutedRequest(i, "key", shared + sequence(2 + i, 50), task_group="g") for i in range(4)]
    cluster.router.place(members, 0.0)
    assert cluster.router.families.num_followers("kind") == pytest.approx(3, rel=0.01)
    family = cluster.router.tree.match("key", shared + sequence(9, 50)).family
    assert family is not None
    assert family.replica == members[0].replica
    # Members that share little begin each for itself.
    others = [
        RoutedRequest(10 + i, "key", sequence(1, 50) + sequence(20 + i, 800), task_group="h")
        for i in range(4)
    ]
    cluster.router.place(others, 0.0)
    assert cluster.router.families.num_followers("kind") == pytest.approx(3 / 5, rel=0.02)
