"""Observations of a client: outputs of a live graph, and the deltas of a watched tree against a plain map."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.backends.scripted_generator import ScriptedContext, ScriptedGenerator
from agentflow.protocol import ops
from agentflow.protocol.events import (
    Delta,
    Event,
    GraphReply,
    LiveMedium,
    Peeked,
    Reached,
    Stats,
    TreeNode,
    Value,
    Watched,
)
from agentflow.protocol.images import file_source
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import Snapshot, SnapshotNode
from agentflow.runtime.interpreter.interpreter import Interpreter
from agentflow.runtime.interpreter.observation import WatchedTree
from agentflow.runtime.programs.graph import MAX_MEDIA
from agentflow.runtime.programs.live import MAX_SHOWN_EDGES

pytestmark = pytest.mark.anyio
PICTURE = b"\x89PNG\r\n\x1a\n a picture"
TENANTS = st.sampled_from(["ann", "bob"])


@asynccontextmanager
async def scripted(answer: str = "one two three") -> AsyncIterator[Interpreter[ScriptedContext]]:
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            yield Interpreter(ScriptedGenerator(lambda prompt: answer), group)
            group.cancel_scope.cancel()


async def events_until(interpreter: Interpreter[ScriptedContext], last: type[Event]) -> list[Event]:
    events: list[Event] = []
    while not any(isinstance(event, last) for event in events):
        events += await interpreter.events.next()
    return events


@pytest.mark.parametrize("live", [False, True])
async def test_outputs_of_a_live_graph_are_reported_while_they_are_generated(live: bool) -> None:
    gens = [ops.Gen(1, var, "x", GenParams()) for var in (2, 3)]
    async with scripted() as interpreter:
        interpreter.submit(ops.SubmitGraph(5, (ops.Open(1), *gens), outputs=(3,), live=live))
        events = await events_until(interpreter, Reached)
    assert {event.var for event in events if isinstance(event, Delta | Value)} == {7}
    deltas = [event for event in events if isinstance(event, Delta)]
    (value,) = [event for event in events if isinstance(event, Value)]
    assert bool(deltas) == live
    assert "".join([event.text for event in [*deltas, value]]) == "one two three"


async def test_a_backend_that_cannot_be_watched_says_so() -> None:
    async with scripted() as interpreter:
        assert not interpreter._generator.capabilities.watch
        interpreter.submit(ops.Watch(3))
        (watched,) = await events_until(interpreter, Watched)
        interpreter.submit(ops.Peek(4, 1))
        (peeked,) = await events_until(interpreter, Peeked)
        interpreter.submit(ops.Unwatch())
        assert (watched.ticket, watched.error.code) == (3, "not_supported")
        assert (peeked.ticket, peeked.error.code) == (4, "bad_argument")


NUMBERS = st.integers(1, 12)


@st.composite
def snapshots(draw: st.DrawFn) -> list[Snapshot]:
    """Trees that grow, shrink, split and are replaced."""
    made: list[Snapshot] = []
    parents: dict[int, int] = {}
    epoch = 1
    for time_s in range(draw(st.integers(1, 8))):
        if draw(st.integers(0, 9)) == 0:
            epoch, parents = epoch + 1, {}
        for number in draw(st.lists(NUMBERS, max_size=6)):
            if number in parents and number not in parents.values():
                del parents[number]  # evicted
            elif number not in parents:
                parents[number] = draw(st.sampled_from([0, *parents]))  # new, below any node
                moved = draw(st.sampled_from([None, *parents]))
                if moved is not None and moved != number and parents[moved] == parents[number]:
                    parents[moved] = number  # the upper part of a split
        order = sorted(parents, key=lambda number: depth(parents, number))
        nodes = [
            SnapshotNode(n, parents[n], *draw(st.tuples(*[st.integers(0, 2)] * 4)), 0.0, draw(TENANTS))
            for n in order
        ]
        made.append(Snapshot(epoch, float(time_s), (), (), Stats("m"), nodes, len(nodes) + 1))
    return made


def depth(parents: dict[int, int], number: int) -> int:
    return 0 if not number else 1 + depth(parents, parents[number])


@given(snapshots(), st.sets(st.integers(0, 7)))
def test_deltas_applied_to_an_empty_map_give_the_snapshot(made: list[Snapshot], resets: set[int]) -> None:
    sent = WatchedTree()
    known: dict[int, TreeNode] = {}
    last: Snapshot | None = None
    for index, snapshot in enumerate(made):
        is_new = last is None or last.epoch != snapshot.epoch
        if index in resets:
            sent.reset()
        delta = sent.delta(snapshot)
        assert delta.reset == (is_new or index in resets)
        if delta.reset:
            known.clear()
        for node in delta.nodes:
            assert node.parent == 0 or node.parent in known
            known[node.id] = node
        for gone in delta.gone:
            del known[gone]
        numbers = {node_id: sent.find_number(node_id) for node_id in known}
        shown = {
            (numbers[node.id], numbers.get(node.parent, 0), *tuple_of(node)[2:6], delta.tenants[node.tenant])
            for node in known.values()
        }
        assert shown == {(*node[:6], node.tenant) for node in snapshot.nodes}
        assert delta.num_nodes_left_out == 1
        if not delta.reset and last is not None:
            changed = {node.number for node in snapshot.nodes} - {
                node.number for node in last.nodes if node in snapshot.nodes
            }
            assert {numbers[node.id] for node in delta.nodes} == changed
        last = snapshot


def tuple_of(node: TreeNode) -> tuple[float, ...]:
    return tuple(getattr(node, name) for name in node.__struct_fields__)


async def test_a_drain_has_one_live_graph_of_bounded_size() -> None:
    numbers = range(2, 152)
    async with scripted() as interpreter:
        interpreter.submit(ops.Open(1))
        for var in numbers:
            interpreter.submit(ops.Expect(1, var, "x"))
        needs_all = ops.Text(0, tuple([ops.Ref(var) for var in numbers]))
        for state in numbers:
            interpreter.submit(ops.Open(state))
            interpreter.submit(msgspec.structs.replace(needs_all, state=state))
            interpreter.submit(ops.Gen(state, 1_000 + state, "x", GenParams()))
        for ticket in range(1, 11):
            interpreter.submit(ops.GetGraph(ticket))
        drains: list[list[GraphReply]] = []
        while sum(map(len, drains)) < 10:
            events = await interpreter.events.next()
            drains.append([event for event in events if isinstance(event, GraphReply)])
            await anyio.lowlevel.checkpoint()
        assert max(map(len, drains)) == 1
        replies = [reply for drain in drains for reply in drain]
        assert [reply.ticket for reply in replies] == [*range(1, 11)]
        graph = replies[0].graph
        assert graph is not None
        assert 0 < sum(len(node.needs) for node in graph.nodes) <= MAX_SHOWN_EDGES
        assert len(graph.nodes) + graph.num_nodes_left_out == 2 * len(numbers)
        assert len(msgspec.json.encode(graph)) < 200_000


async def test_a_live_graph_has_the_media_before_each_request() -> None:
    url = "https://example.org/leaf.png"
    upload = ops.Upload(file_source(PICTURE), len(PICTURE), 0, PICTURE)
    async with scripted() as interpreter:
        interpreter.submit(ops.Open(1))
        interpreter.submit(ops.Expect(1, 100, "later"))
        interpreter.submit(ops.Text(1, (ops.Ref(100),)))
        interpreter.submit(upload)
        for source in (upload.source, *[url] * MAX_MEDIA):
            interpreter.submit(ops.Image(1, source))
        interpreter.submit(ops.Fork(1, (2, 3)))
        for state in (1, 2, 3):
            interpreter.submit(ops.Gen(state, 10 * state, "x", GenParams()))
        interpreter.submit(ops.Gen(1, 11, "again", GenParams()))
        interpreter.submit(ops.GetGraph(1))
        reply = None
        while reply is None:
            events = await interpreter.events.next()
            reply = next((event for event in events if isinstance(event, GraphReply)), None)
        assert reply.graph is not None
        nodes = {node.var: node for node in reply.graph.nodes}
        for var in (10, 20, 30):
            assert nodes[var].num_media == MAX_MEDIA + 1
            assert len(nodes[var].media) == MAX_MEDIA
            assert nodes[var].media[:2] == (
                LiveMedium(upload.source, "image", "image/png", len(PICTURE)),
                LiveMedium(url),
            )
        assert (nodes[11].media, nodes[11].num_media) == ((), 0)
        assert f"{MAX_MEDIA + 1} images" in str(reply.graph)
