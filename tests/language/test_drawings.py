"""Graphs and runs as SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs import ask, echo

import agentflow as af
from agentflow.language.display.svg import MAX_BOXES, Arrow, Bar, Box, ForkMark, graph_svg, runs_svg
from agentflow.language.observing.runs import MAX_RUNS

pytestmark = pytest.mark.anyio
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


@af.program
async def judge(s: af.State, essay: str) -> str:
    s += af.user(f"Judge <b> & {essay}")
    async with s.fork(2) as branches:
        for branch in branches:
            branch += af.assistant(af.gen("judgment"))
    s += af.user(*branches.variables("judgment"))
    s += af.assistant(af.select("grade", ["A", "B"]))
    return await s["grade"]


def test_a_graph_is_drawn():
    graph = judge.trace()
    svg = graph._repr_svg_()
    assert texts(svg) == [
        "essay",
        "user: Judge <b> & {essay}",
        "assistant: gen judgment",
        "assistant: gen judgment",
        "user: {judgment}{judgment}",
        "assistant: select grade: A | B",
    ]
    # One arrow for the argument, two for the fork, two for the judgments, two along the root.
    assert len(list(ET.fromstring(svg).iter(f"{SVG}path"))) == 7


def test_an_empty_graph_is_drawn():
    @af.program
    async def nothing(s: af.State) -> None:
        pass

    assert texts(nothing.trace()._repr_svg_()) == []


def test_a_large_graph_is_drawn_in_part():
    items = [Box(f"n{i}", f"op {i}", "text", 1) for i in range(1000)]
    arrows = [Arrow(f"n{i}", f"n{i + 1}", "stream") for i in range(999)]
    svg = graph_svg("large", 1, items, arrows)
    assert len(texts(svg)) == MAX_BOXES + 1
    assert texts(svg)[-1] == "… 600 more"


@given(st.data())
def test_no_two_boxes_overlap(data: st.DataObject):
    """Random fork trees, whose states append before, between and after their forks."""
    items: list[Box | ForkMark] = []
    lanes, pending = [1], [1]
    while pending:
        lane = pending.pop(0)
        for _ in range(data.draw(st.integers(0, 3))):
            if len(lanes) < 12 and data.draw(st.booleans()):
                children = tuple(range(lanes[-1] + 1, lanes[-1] + 1 + data.draw(st.integers(1, 3))))
                items.append(ForkMark(lane, children))
                lanes += children
                pending += children
            else:
                items.append(Box(f"n{len(items)}", "x", "text", lane))
    root = ET.fromstring(graph_svg("random", 1, items, []))
    places = [(float(r.get("x", "")), float(r.get("y", ""))) for r in root.iter(f"{SVG}rect")]
    width = max([float(r.get("width", "")) for r in root.iter(f"{SVG}rect")], default=0.0)
    assert len(places) == sum(isinstance(item, Box) for item in items)
    for index, (x, y) in enumerate(places):
        assert 0 <= x <= float(root.get("width", "")) - width
        assert 0 <= y <= float(root.get("height", ""))
        assert all(abs(x - x2) >= width or y != y2 for x2, y2 in places[:index])


@given(name=st.text(), label=st.text())
def test_any_text_gives_valid_svg(name: str, label: str):
    ET.fromstring(graph_svg(name, 1, [Box("n0", label, "gen", 1)], []).encode())
    ET.fromstring(runs_svg([Bar(name, 0.0, 1.0, label, "#000")]).encode())


async def test_runs_are_kept_with_their_costs():
    async with af.session(backend=af.Scripted(echo)) as flow:
        assert len(flow.runs) == 0
        assert "no runs" in str(flow.runs)
        await flow.run(ask, "a b")
        with pytest.raises(af.errors.EngineFailed):
            await flow.run(ask, "a!")
        await flow.map(ask, ["c", "d"])
        s = flow.state()
        assert [run.program for run in flow.runs] == ["ask"] * 4 + ["state"]
        assert [run.error for run in flow.runs] == ["", "engine_failed", "", "", ""]
        assert [run.is_done for run in flow.runs] == [True] * 4 + [False]
        first = flow.runs[0]
        assert first.usage.output_tokens > 0
        assert first.duration_s == first.duration_s > 0
        assert flow.runs[1:3] == list(flow.runs)[1:3]
        assert str(flow.runs).count("\n") == 4
        drawn = texts(flow.runs._repr_svg_())
        assert drawn[::2] == ["ask"] * 4 + ["state"]
        assert "engine_failed" in drawn[3]
        s.close()
        assert flow.runs[-1].is_done


async def test_only_the_latest_runs_are_kept():
    async with af.session(backend=af.Scripted(echo)) as flow:
        with anyio.fail_after(60):
            await flow.map(ask, [str(number) for number in range(MAX_RUNS + 50)])
        assert len(flow.runs) == MAX_RUNS
        assert len(texts(flow.runs._repr_svg_())) <= 100
