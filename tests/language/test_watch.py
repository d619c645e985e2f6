"""``flow.watch()`` on backends without a server."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

import agentflow as af

pytestmark = pytest.mark.anyio


async def test_a_loop_follows_the_session_until_it_is_left() -> None:
    with anyio.fail_after(20):
        async with af.session(backend=af.Scripted("Why?")) as flow, flow.state():
            seen: list[int] = []
            async for graphs in flow.watch(interval_s=0.1):
                seen += [len(graph.states) for graph in graphs]
                if len(seen) == 1:
                    another = flow.state(program="another")
                elif seen[-1] == 2:
                    assert graphs[0].states[-1].label == "another"
                    another.close()
                else:
                    break
            assert seen == [1, 2, 1]
            assert not (await flow.graph()).nodes


async def test_a_watch_ends_with_its_session() -> None:
    with anyio.fail_after(20):
        async with af.session(backend=af.Scripted("no")) as flow:
            watch = flow.watch(interval_s=0.1)
            await anext(watch)
        with pytest.raises(af.Cancelled):
            await anext(watch)


async def test_a_replay_has_no_live_graph_and_a_recording_no_watch(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    async def one(flow: af.Session) -> tuple[int, str]:
        async with flow.state() as s:
            s += "B" + af.gen("part")
            graphs = await anext(flow.watch(interval_s=0.1))
            return len(graphs), await s["part"]

    with anyio.fail_after(20):
        async with af.session(backend=af.Scripted("word"), record=path) as flow:
            assert await one(flow) == (1, "word")
        assert 'op":"watch' not in path.read_text()
        assert "watched" not in path.read_text()
        async with af.session(backend=af.Replay(path)) as flow:
            assert await one(flow) == (1, "word")


async def test_a_session_with_several_backends_shows_its_default_one() -> None:
    models = {"small": af.Scripted("a"), "large": af.Scripted("b")}
    with anyio.fail_after(20):
        async with af.session(models=models) as flow, flow.state(), flow.state(model="large"):
            assert [len(graph.states) for graph in await anext(flow.watch(interval_s=0.1))] == [1]
