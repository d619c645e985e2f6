"""Watching live graphs over a real websocket: by frames, in Python, and in the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.api_server import ApiServer, api_server
from support.session_errors import Session, gen, session

import agentflow as af
from agentflow.cli.main import main
from agentflow.errors import BadArgument
from agentflow.language.observing.graph_watch import GraphsView
from agentflow.protocol.events import GraphsDelta
from agentflow.runtime.interpreter import observation
from agentflow.server.tenants.keys import Tenants, hashed_key

WATCH = {"op": "watch", "ticket": 1, "interval_s": 0.1, "steps": False, "tree": False, "graphs": True}


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[ApiServer]:
    file = tmp_path / "keys.toml"
    tenants = [f'[tenants.{name}]\nkeys = ["{hashed_key(name)}"]' for name in ("ann", "bob")]
    file.write_text("\n".join([*tenants, "sees_metrics = true"]))
    with api_server(tenants=Tenants(file=file), constraints=False) as server:
        yield server


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server(constraints=False) as running:
        yield running


def wired(opened: Session, state: int, label: str) -> None:
    """Two requests that need a value of the client; the second one also needs the first one's value."""
    opened.ops(
        {"op": "open", "state": state, "label": label},
        {"op": "expect", "state": state, "var": state + 100, "name": "answer"},
        {"op": "text", "state": state, "parts": [{"op": "ref", "var": state + 100}]},
        gen(state, state + 101, name="first"),
        {"op": "open", "state": state + 1, "label": label},
        {"op": "text", "state": state + 1, "parts": [{"op": "ref", "var": state + 101}]},
        gen(state + 1, state + 102, name="second"),
    )


def looks(opened: Session, **fields: Any) -> Iterator[dict[str, Any]]:
    opened.ops({**WATCH, **fields})
    return (event for event in opened.events() if event["event"] == "watched")


def labels(view: GraphsView) -> list[list[str]]:
    return [[state.label for state in graph.states] for graph in view.graphs()]


def applied(view: GraphsView, event: dict[str, Any]) -> GraphsDelta:
    delta = msgspec.convert(event["graphs"], GraphsDelta)
    view.apply(delta)
    return delta


def test_a_watch_follows_the_programs_of_its_tenant(keyed: ApiServer) -> None:
    view = GraphsView()
    keys = ("ann", "ann", "bob")
    with ExitStack() as stack:
        own, other, foreign = [stack.enter_context(session(keyed, key=key)) for key in keys]
        wired(foreign, 1, "secret")
        events = looks(own)
        first = next(events)
        assert first.keys() == {"event", "ticket", "graphs"}
        assert applied(view, first).reset
        wired(other, 1, "judge")
        wired(own, 1, "mine")
        while [len(graph.nodes) for graph in view.graphs()] != [3, 3]:
            assert not applied(view, next(events)).reset
        assert labels(view) == [["mine", "mine"], ["judge", "judge"]]
        expected, before, after = view.graphs()[1].nodes
        assert (before.needs, after.needs) == ((expected.id,), (before.id,))
        other.ops({"op": "provide", "var": 101, "text": "Because."})
        while view.graphs()[1].nodes:
            assert [one.id for one in applied(view, next(events)).graphs] == [2]
        other.ops({"op": "close", "state": 1}, {"op": "close", "state": 2})
        while len(view.graphs()) > 1:
            assert applied(view, next(events)).graphs == ()
        with session(keyed, key="bob") as viewer:  # which sees the metrics of every tenant
            seen = GraphsView()
            applied(seen, next(looks(viewer)))
            assert labels(seen) == [[], ["secret", "secret"]]


def test_graphs_come_with_the_engine_that_is_watched(server: ApiServer) -> None:
    with session(server) as worker, session(server) as viewer:
        wired(worker, 1, "judge")
        event = next(looks(viewer, steps=True, tree=True))
        assert {"stats", "tree", "graphs"} <= event.keys()
        view = GraphsView()
        applied(view, event)
        assert labels(view) == [[], ["judge", "judge"]]


def test_a_resumed_session_gets_all_graphs_again(server: ApiServer) -> None:
    view = GraphsView()
    with session(server) as worker:
        wired(worker, 1, "judge")
        with session(server) as viewer:
            applied(view, next(looks(viewer)))
            viewer.socket.socket.close()
            with session(server, greets=False) as again:
                again.hello(resume={**viewer.to_resume, "variables": {}, "states": {}})
                (event,) = itertools.islice(again.events(), 1)
                assert applied(view, event).reset
        assert labels(view) == [[], ["judge", "judge"]]


def test_watches_of_graphs_are_limited(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "MAX_GRAPH_WATCHES", 1)
    with session(server) as first, session(server) as second:
        assert "graphs" in next(looks(first))
        assert next(looks(second))["error"]["code"] == "overloaded"
        assert "graphs" in next(looks(first, ticket=2))  # in place of the first one
        first.ops({"op": "unwatch"})
        while "error" in (event := next(looks(second))):
            assert event["error"]["code"] == "overloaded"


@pytest.mark.anyio
async def test_a_session_of_the_library_watches(server: ApiServer) -> None:
    seen: list[list[list[str]]] = []
    async with af.session(server.url.replace("http", "ws")) as flow, flow.state() as s:
        async for graphs in flow.watch(interval_s=0.1):
            seen.append([[node.name for node in graph.nodes] for graph in graphs])
            if len(seen) == 1:
                s += "Why? " + af.gen("why", max_tokens=900, ignore_eos=True)
            elif seen[-1] == [[]]:
                break
        with pytest.raises(BadArgument):
            flow.watch(interval_s=0)
        earlier = flow.watch(interval_s=0.1)
        assert await anext(earlier)
        later = flow.watch(interval_s=0.1)
        with pytest.raises(StopAsyncIteration):
            await anext(earlier)
        assert await anext(later)
    assert seen[0] == [[]]
    assert [["why"]] in seen


def test_the_terminal_shows_programs(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    with session(server) as worker:
        wired(worker, 1, "judge\x1b")
        worker.ops({"op": "open", "state": 9, "label": "idle"}, {"op": "await", "state": 9, "ticket": 1})
        assert any(event["event"] == "reached" for event in worker.events())
        assert main(["watch", "--url", server.url, "--once"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert ["1", "judge·", "1", "first", "waiting", "latency", "answer"] in shown
    assert ["1", "judge·", "2", "second", "waiting", "latency", "first"] in shown
    assert ["1", "idle", "9", "-", "waits", "for", "its", "client"] in shown
