"""Named transforms: the same on the client's side and on the server's; their failures stay where they are."""

from __future__ import annotations

import gc
import json
import re
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param
from support.observed_backends import Observed, assert_idle

import agentflow as af
from agentflow.protocol import ops
from agentflow.protocol.text.transform import MAX_PATTERN_CHARS, Transform, apply_transforms

pytestmark = pytest.mark.anyio

HOSTILE, VICTIM = r"(a|aa)+$", "a" * 80 + "b"


PLACE = '{"city": {"name": "Köln", "parts": ["Deutz", "Ehrenfeld"], "size": 1.5, "old": true, "mayor": null}}'
RESULTS = [
    ("strip", "", " \n a b \t", "a b"),
    ("lower", "", "ÄB", "äb"),
    ("upper", "", "äb", "ÄB"),
    ("first_line", "", "\n\n  a b  \nc", "a b"),
    ("first_line", "", "", ""),
    ("json", "city.name", PLACE, "Köln"),
    ("json", "city.parts.1", PLACE, "Ehrenfeld"),
    ("json", "city.parts", PLACE, '["Deutz", "Ehrenfeld"]'),
    ("json", "city.size", PLACE, "1.5"),
    ("json", "city.old", PLACE, "true"),
    ("json", "city.mayor", PLACE, "null"),
    ("json", "", ' {"a":  "ö"}', '{"a": "ö"}'),
    ("json", "", '"half \\ud83d of it"', "half \N{REPLACEMENT CHARACTER} of it"),
    ("json", "", '"\\ud83d\\ude00"', "\N{GRINNING FACE}"),
    ("regex", "[0-9]+", "a 12 b 34", "12"),
    ("regex", "([0-9]+) b ([0-9]+)", "a 12 b 34", "12"),
    ("regex", "a(x)?b", "ab", ""),
    ("regex", "(?<=b )\\w+", "a 12 b 34", "34"),
]
FAILURES = [
    ("json", "a", "no JSON", r"json\('a'\): .*: 'no JSON'"),
    ("json", "", "[" * 100_000, r"json\(''\): "),
    ("json", "city.street", PLACE, "'street'"),
    ("json", "city.parts.2", PLACE, "'2'"),
    ("json", "city.parts.first", PLACE, "'first'"),
    ("json", "city.name.0", PLACE, "'0'"),
    ("json", "city.size.x", PLACE, "'x'.*'1.5'"),
    ("regex", "[0-9]+", "no digits", r"regex\('\[0-9\]\+'\) .*'no digits'"),
    ("regex", HOSTILE, VICTIM, "the search takes too long"),
]


def applied(reference: af.Variable, name: str, argument: str) -> af.Transformed:
    return getattr(reference, name)(argument) if argument else getattr(reference, name)()


@pytest.mark.parametrize(("name", "argument", "text", "expected"), RESULTS)
async def test_the_result_of_a_transform(name, argument, text, expected):
    async with af.session(backend=af.Scripted([text])) as flow, flow.state() as s, flow.state() as other:
        s += af.gen("x", max_tokens=100_000)
        changed = applied(s["x"], name, argument)
        other += changed
        assert await changed == expected
        assert await other.text() == expected
        assert await s["x"] == text


@pytest.mark.parametrize(("name", "argument", "text", "message"), FAILURES)
async def test_a_failing_transform_fails_only_its_consumers(name, argument, text, message):
    backend = af.Scripted([text])
    async with af.session(backend=backend) as flow, flow.state() as s, flow.state() as other:
        s += af.gen("x", max_tokens=100_000)
        other += applied(s["x"], name, argument) + af.gen("y")
        with pytest.raises(af.errors.RunFailed, match=message):
            await applied(s["x"], name, argument)
        with pytest.raises(af.errors.RunFailed, match=message):
            await other
        with pytest.raises(af.errors.RunFailed, match="'y'"):
            await other["y"]
        await s
        assert await s.text() == text
    assert_idle(backend)


async def test_transforms_over_the_wire(server):
    async with af.session(server.url) as flow, flow.state() as s, flow.state() as other:
        s.set("place", PLACE)
        other += f"in {s['place'].json('city.name').upper()}," + s["place"].regex('"(D.*?)"').lower()
        assert await other.text() == "in KÖLN,deutz"
        failing = other.copy()
        failing += s["place"].json("city.street")
        with pytest.raises(af.errors.RunFailed, match="'street'"):
            await failing
        half = s.set("half", '{"a": "\\ud83d!"}')
        assert await s.set("reported", half.json("a")) == "\N{REPLACEMENT CHARACTER}!"
        await other


texts = st.text(max_size=20) | st.recursive(
    st.none() | st.booleans() | st.integers(0, 99) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
).map(json.dumps)
chains = st.lists(
    st.sampled_from(["strip", "lower", "upper", "first_line"]).map(lambda name: (name, ""))
    | st.tuples(st.just("json"), st.sampled_from(["", "a", "a.b", "0", "b.0"]))
    | st.tuples(st.just("regex"), st.sampled_from([".", r"\w+", r'"(.*?)"', r"(a)|b", r"\d\d"])),
    min_size=1,
    max_size=4,
)


@given(text=texts, chain=chains)
async def test_the_client_and_the_server_give_the_same_results(text, chain):
    async with af.session(backend=af.Scripted([])) as flow, flow.state() as s, flow.state() as other:
        reference = s.set("x", text)
        for name, argument in chain:
            reference = applied(reference, name, argument)
        wired = other.set("y", reference)
        here, there = [await outcome(waiting) for waiting in (reference, wired)]
        assert here == there
        with suppress(af.errors.RunFailed):
            assert here == apply_transforms(text, tuple(Transform(*step) for step in chain))


async def outcome(waiting: af.Variable | af.Transformed) -> str:
    """Its value, or its error."""
    try:
        return await waiting
    except af.errors.RunFailed as failure:
        return f"failed: {failure}"


async def test_a_slow_pattern_does_not_block_the_event_loop():
    """During the search, on either side, the event loop runs and serves others."""
    backend = af.Scripted({"y": "one two three"})
    async with af.session(backend=backend) as flow, flow.state() as s, flow.state() as other:
        hostile = s.set("x", VICTIM).regex(HOSTILE)
        bad = s.copy()
        bad += hostile
        num_turns = 0
        while bad._node.error is None:
            await anyio.lowlevel.checkpoint()
            num_turns += 1
        assert num_turns > 100
        failed = anyio.Event()

        async def read():
            with pytest.raises(af.errors.RunFailed, match="takes too long"):
                await hostile
            failed.set()

        flow._link.start_soon(read)
        num_turns = 0
        while not failed.is_set():
            await anyio.lowlevel.checkpoint()
            num_turns += 1
        assert num_turns > 100
        other += "go" + af.gen("y")
        assert await other["y"] == "one two three"
        with pytest.raises(af.errors.RunFailed, match="takes too long"):
            await bad
        assert await s.text() == ""
    assert_idle(backend)


async def test_leaving_during_a_search_does_not_wait_for_it():
    backend = af.Scripted([])
    with anyio.fail_after(10):
        async with af.session(backend=backend) as flow, flow.state() as s:
            for _ in range(20):
                s.copy().add(s.set("x", VICTIM).regex(HOSTILE))
            await s
    assert_idle(backend)


@pytest.mark.parametrize(
    "pattern", ["(", "a**", "", "x" * (MAX_PATTERN_CHARS + 1), "(" * 450 + ")" * 450, None, 3, b"a"]
)
async def test_an_invalid_pattern_is_rejected(pattern):
    async with af.session(backend=af.Scripted(["x"])) as flow, flow.state() as s:
        s += af.gen("x")
        with pytest.raises(af.errors.BadArgument, check=has_param("pattern")):
            s["x"].regex(pattern)


NO_PATTERNS = ["(" * 450 + ")" * 450, "(", ""]


@pytest.mark.parametrize(
    ("transforms", "check"),
    [
        *[((Transform("regex", pattern),), has_param("pattern")) for pattern in NO_PATTERNS],
        ((Transform("strip"),) * 17, lambda error: re.search(r"\b16\b", str(error))),
    ],
)
async def test_wrong_transforms_over_the_wire_fail_their_state(server, transforms, check):
    async with af.session(server.url) as flow, flow.state() as s, flow.state() as other:
        variable = s.set("x", "text")
        flow._link._connection.send([ops.Text(s.id, (ops.Ref(variable.id, transforms),))])
        s += "more"
        with pytest.raises(af.errors.BadArgument, check=check):
            await s
        other += variable
        assert await other.text() == "text"
    await server.wait_until_idle()


async def test_the_number_of_transforms_is_limited():
    async with af.session(backend=af.Scripted(["x"])) as flow, flow.state() as s:
        s += af.gen("x")
        reference = s["x"]
        for _ in range(16):
            reference = reference.strip()
        with pytest.raises(af.errors.BadArgument, match=r"\b16\b"):
            reference.strip()
        assert await reference == "x"


async def test_a_marker_of_a_transformed_variable_survives_the_garbage_collector():
    async with af.session(backend=af.Scripted([" a "])) as flow, flow.state() as s:
        s += af.gen("x")
        texts = []
        for _ in range(100):
            texts.append(f"[{s['x'].strip().upper()}]")
            gc.collect(0)
        gc.collect()
        assert len(set(texts)) == 1
        s += "".join(texts)
        assert await s.text() == " a " + "[A]" * 100


async def test_a_transform_names_itself():
    async with af.session(backend=af.Scripted(["x"])) as flow, flow.state() as s:
        s += af.gen("x")
        changed = s["x"].strip().json("a.b")
        assert repr(changed).partition(" ")[2] == "'x'.strip().json('a.b')>"
        assert changed is s["x"].strip().json("a.b")
        with pytest.raises(
            af.errors.BadArgument, match=r"variable 'x'\.strip\(\)\.json\('a.b'\) is a reference"
        ):
            bool(changed)


async def test_a_transform_of_a_variable_of_an_ended_run_is_its_value():
    observed = Observed(af.Scripted([" A "]))
    async with af.session(backend=observed) as flow, flow.state() as other:
        async with flow.state() as s:
            s += af.gen("x")
            await s
        other += f"{s['x'].strip().lower()}!"
        assert await other.text() == "a!"
        assert observed.of(ops.Text)[-1].parts == ("a", "!")
