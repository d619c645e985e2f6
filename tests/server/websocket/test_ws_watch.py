"""Watching an engine over a real websocket: the reports, who sees them, and their limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api_server import ApiServer, api_server
from support.session_errors import Session, gen, session, text

from agentflow.engine.watching import shared_watches
from agentflow.runtime.interpreter import observation
from agentflow.server.config.limits import ServerLimits
from agentflow.server.tenants.keys import Tenants, hashed_key

WATCH = {"op": "watch", "ticket": 1, "interval_s": 0.1}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots come at the requested rate, for any duration of a snapshot. The engine may do all its work
    in a pause."""
    monkeypatch.setattr(shared_watches, "ENGINE_PART", 1e9)
    monkeypatch.setattr(shared_watches, "LOOP_PART", 1e9)


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[ApiServer]:
    file = tmp_path / "keys.toml"
    tenants = [
        f'[tenants.{name}]\nkeys = ["{hashed_key(name)}"]\nsees_metrics = {sees}'
        for name, sees in (("ann", "false"), ("bob", "false"), ("ops", "true"))
    ]
    file.write_text("\n".join(tenants))
    with api_server(tenants=Tenants(file=file), constraints=False) as server:
        yield server


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server(constraints=False) as running:
        yield running


def generate(opened: Session, state: int, prompt: str, program: str = "") -> None:
    """Runs a gen to its end; the state stays open."""
    opened.ops(
        {"op": "open", "state": state, "program": program},
        text(prompt, state=state),
        gen(state, state + 1),
        {"op": "await", "state": state, "ticket": 1},
    )
    assert any(event["event"] == "reached" for event in opened.events())


class Tree:
    """The tree, as far as a client knows it."""

    def __init__(self) -> None:
        self.nodes: dict[int, list[Any]] = {}
        self.tenants: list[str] = []
        self.num_left_out = 0

    def apply(self, delta: dict[str, Any]) -> None:
        if delta.get("reset"):
            self.nodes.clear()
        for node in delta.get("nodes", []):
            self.nodes[node[0]] = node
        for gone in delta.get("gone", []):
            del self.nodes[gone]
        self.tenants = delta.get("tenants", [])
        self.num_left_out = delta.get("num_nodes_left_out", 0)
        assert all(node[1] == 0 or node[1] in self.nodes for node in self.nodes.values())

    @property
    def num_tokens(self) -> int:
        return sum(node[2] for node in self.nodes.values())


def watched(opened: Session, **fields: Any) -> Iterator[dict[str, Any]]:
    opened.ops({**WATCH, **fields})
    return (event for event in opened.events() if event["event"] == "watched")


def peek(opened: Session, node: int) -> dict[str, Any]:
    opened.ops({"op": "peek", "ticket": 7, "node": node})
    return next(event for event in opened.events() if event["event"] == "peeked")


def keep_busy(opened: Session, program: str, label: str = "") -> None:
    """Sends more long gens than fit into memory together, without waiting for them."""
    for state in range(100, 140, 2):
        params = {"max_tokens": 900, "ignore_eos": True}
        ask = text(f"{state}: why?", state=state)
        root = {"op": "open", "state": state, "program": program, "label": label}
        opened.ops(root, ask, gen(state, state + 1, params=params))


def test_a_watch_shows_steps_requests_counters_and_the_tree(server: ApiServer) -> None:
    with session(server) as worker, session(server) as viewer:
        assert viewer.welcome["models"][viewer.welcome["model"]]["watch"] is True
        events = watched(viewer)
        tree = Tree()
        tree.apply(next(events)["tree"])
        keep_busy(worker, "judge")
        numbers: list[int] = []
        statuses: set[str] = set()
        while statuses != {"running", "waiting"} or not numbers:
            event = next(events)
            tree.apply(event["tree"])
            if numbers and event.get("steps"):
                assert event["steps"][0][0] == numbers[-1] + 1 + event.get("steps_skipped", 0)
            numbers += [step[0] for step in event.get("steps", [])]
            assert numbers == sorted(set(numbers))
            requests = event.get("requests", [])
            order = [request["status"] for request in requests]
            assert order == sorted(order)
            statuses |= set(order)
            assert {(request["program"], request["tenant"]) for request in requests} <= {("judge", "")}
            assert event["stats"]["running"] == order.count("running")
            assert event["stats"]["waiting"] == order.count("waiting")
            assert tree.num_tokens == event["stats"]["cached_slots"]


def test_an_event_has_only_what_has_changed(server: ApiServer) -> None:
    with session(server) as worker, session(server) as viewer:
        generate(worker, 1, "Why?")
        tree = Tree()
        events = watched(viewer)
        first, second = next(events), next(events)
        assert first["tree"]["reset"] is True
        assert second["tree"].keys() == {"tenants"}
        tree.apply(first["tree"])
        generate(worker, 10, "Why? And how?")
        while tree.num_tokens < server.stats().cached_slots:
            event = next(events)
            assert "reset" not in event["tree"]
            tree.apply(event["tree"])
        assert any(event[1] for event in tree.nodes.values())


def test_a_peek_has_the_text_of_a_node(server: ApiServer) -> None:
    with session(server) as worker, session(server) as viewer:
        generate(worker, 1, "Why is the sky blue?")
        tree = Tree()
        tree.apply(next(watched(viewer))["tree"])
        texts = [peek(viewer, node) for node in tree.nodes]
        assert "Why is the sky blue?" in "".join(one["text"] for one in texts)
        assert [one["num_tokens"] for one in texts] == [node[2] for node in tree.nodes.values()]
        assert peek(viewer, 99)["error"]["code"] == "bad_argument"
        viewer.ops({"op": "unwatch"})
        assert peek(viewer, min(tree.nodes))["error"]["code"] == "bad_argument"


def test_the_largest_number_of_nodes_is_kept_with_all_parents(server: ApiServer) -> None:
    with session(server) as worker, session(server) as viewer:
        for number in range(6):
            generate(worker, 10 * number + 1, f"{number}: why?")
        tree, whole = Tree(), Tree()
        tree.apply(next(watched(viewer, max_nodes=3))["tree"])
        whole.apply(next(event for event in watched(viewer, ticket=2) if event["ticket"] == 2)["tree"])
        assert len(tree.nodes) == 3
        assert (tree.num_left_out, whole.num_left_out) == (len(whole.nodes) - 3, 0)


def test_a_tenant_sees_nothing_of_others(keyed: ApiServer) -> None:
    with (
        session(keyed, key="ann") as ann,
        session(keyed, key="bob") as bob,
        session(keyed, key="ops") as operator,
    ):
        generate(ann, 1, "The secret of ann", "ann's program")
        generate(bob, 1, "The secret of bob")
        everyone, own = watched(operator), watched(bob)
        everything, bobs = next(everyone), next(own)
        assert {*everything["tree"]["tenants"]} == {"ann", "bob"}
        assert bobs["tree"]["tenants"] == ["bob"]
        ids = [node[0] for node in bobs["tree"]["nodes"]]
        assert ids == list(range(1, len(ids) + 1))  # not the engine's, which count everybody's
        assert any("bob" in peek(bob, node)["text"] for node in ids)
        codes = {peek(operator, node[0])["error"]["code"] for node in everything["tree"]["nodes"]}
        assert codes == {"not_authorized"}
        keep_busy(ann, "ann's second", label="judge")
        everything = next(event for event in everyone if event.get("requests") and event.get("steps"))
        assert {one["program"] for one in everything["requests"]} == {"judge"}
        bobs = next(own)
        assert "ann" not in str(bobs)
        assert "judge" not in str(bobs)
        assert bobs.keys() == {"event", "ticket", "time_s", "stats", "tree"}  # no steps, no requests
        assert bobs["tree"].keys() <= {"tenants", "nodes", "gone"}
        shown = {name for name, value in bobs["stats"].items() if value}
        assert shown <= {"model", "prompt_tokens", "cached_tokens", "generated_tokens", "rerendered_tokens"}
        assert everything["stats"]["total_slots"] > 0


@pytest.mark.parametrize(
    "fields", [{"interval_s": 0.0}, {"interval_s": 61}, {"max_nodes": 0}, {"max_nodes": 10**9}]
)
def test_an_invalid_watch_is_answered_and_the_session_goes_on(
    server: ApiServer, fields: dict[str, Any]
) -> None:
    with session(server) as viewer:
        assert next(watched(viewer, **fields))["error"]["code"] == "bad_argument"
        viewer.check_goes_on(5)


def test_another_watch_replaces_the_first_and_unwatch_ends_it(server: ApiServer) -> None:
    with session(server) as viewer:
        next(watched(viewer, ticket=1))
        events = watched(viewer, ticket=2, tree=False, steps=False)
        event = next(event for event in events if event["ticket"] == 2)
        assert event.keys() == {"event", "ticket", "time_s", "stats"}
        viewer.ops({"op": "unwatch"}, {"op": "unwatch"})
        viewer.check_goes_on(5)
        server.wait_until(lambda: not server.engine.client.watches._num_of)


def test_an_engine_has_a_number_of_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_watches, "MAX_WATCHES", 1)
    with api_server(constraints=False, server_limits=ServerLimits(resume_grace_s=0.0)) as server:
        with session(server) as first:
            next(watched(first))
            with session(server) as second:
                assert next(watched(second))["error"]["code"] == "overloaded"
                second.check_goes_on(5)
        server.wait_until(lambda: not server.engine.client.watches._num_of)


def test_floods_of_watches_and_peeks_end_only_their_session(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observation, "MAX_PEEKS", 5)
    with session(server) as quiet:
        for op in ({**WATCH, "max_nodes": 0}, {"op": "peek", "ticket": 1, "node": 1}):
            with session(server) as flooding:
                flooding.ops(*[op] * 50)
                assert flooding.end() == ("1013", "`overloaded`")
        with session(server) as flooding:
            flooding.ops(*[WATCH] * 500)
            assert next(event for event in flooding.events() if event["event"] == "watched")
        quiet.check_goes_on(1)


def test_after_a_resume_the_tree_starts_over(server: ApiServer) -> None:
    with session(server) as worker:
        generate(worker, 1, "Why?")
        with session(server) as lost:
            assert next(watched(lost))["tree"]["reset"]
            resume = lost.to_resume
        with session(server, greets=False) as again:
            again.hello(resume=resume)
            event = next(event for event in again.events() if event["event"] == "watched")
            assert event["tree"]["reset"]
            assert event["tree"]["nodes"]
