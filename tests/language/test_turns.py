"""Turns: as calls and as blocks; none inside another; and the conversation read back."""

from __future__ import annotations

import copy
import zlib
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import FakeEngine
from support.observed_backends import Observed, Stepped, Unbatched

import agentflow as af
from agentflow.protocol import ops

pytestmark = pytest.mark.anyio

ROLES = ("system", "user", "assistant", "tool")


def answer(prompt: str) -> str:
    """An answer that depends on the prompt alone."""
    return f"so {zlib.crc32(prompt.encode()) % 1000}"


NAMES = {"tool": "tool_result"}


@pytest.mark.parametrize("role", ROLES)
async def test_a_call_and_a_block_make_the_same_turn(role):
    observed = Observed(af.Scripted(answer))
    async with af.session(backend=observed, seed=1) as flow:
        texts = []
        for is_call in (True, False):
            async with flow.state() as s:
                if is_call:
                    s += getattr(af, NAMES.get(role, role))("a", af.gen("x"), "b")
                else:
                    async with getattr(s, NAMES.get(role, role))() as inner:
                        assert inner is s
                        s += "a" + af.gen("x")
                        s += "b"
                texts.append(await s.text())
                assert await s.messages() == [{"role": role, "content": f"a{answer(f'<{role}>a')}b"}]
    assert texts == [f"<{role}>a{answer(f'<{role}>a')}b</{role}>"] * 2
    assert [op.role for op in observed.of(ops.Begin)] == [role] * 2


OPENINGS = {
    "call": lambda s: s.add(af.user("x")),
    "call in a sum": lambda s: s.add("a" + af.tool_result("x")),
    "call in a call": lambda s: s.add(af.system(af.user("x"))),
}


@pytest.mark.parametrize("how", OPENINGS)
async def test_turns_cannot_be_nested(how):
    observed = Observed(af.Scripted(answer))
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += "before"
        async with s.assistant():
            num_ops = len(observed.ops)
            with pytest.raises(af.errors.BadArgument, match=r"inside another turn"):
                OPENINGS[how](s)
            with pytest.raises(af.errors.BadArgument, match="the assistant turn is open"):
                async with s.tool_result():
                    raise AssertionError("entered")
            branch = s.fork(1)[0]
            num_ops += 1
            with pytest.raises(af.errors.BadArgument, match="inside another turn"):
                OPENINGS[how](branch)
            assert len(observed.ops) == num_ops, "something was submitted"
        s += af.user("y")
        assert await s.text() == "before<assistant></assistant><user>y</user>"


async def test_a_turn_inside_a_call_is_refused_before_anything_is_appended():
    observed = Observed(af.Scripted(answer))
    async with af.session(backend=observed) as flow, flow.state() as s:
        with pytest.raises(af.errors.BadArgument, match="the user turn is open"):
            s += "text" + af.user("a", af.gen("x"), af.assistant("b"))
        assert observed.ops == [ops.Open(s.id)]
        assert "x" not in s
        s += af.user("no turn is open")
        assert await s.messages() == [{"role": "user", "content": "no turn is open"}]


async def test_a_turn_that_is_not_open_cannot_end():
    async with af.session(backend=af.Scripted(answer)) as flow, flow.state() as s:
        with pytest.raises(af.errors.BadArgument, match="no open turn"):
            s.end()
        s += af.user("x")
        with pytest.raises(af.errors.BadArgument, match="no open turn"):
            s.end()
        assert await s.text() == "<user>x</user>"


async def test_branches_inherit_an_open_turn_and_end_it_for_themselves():
    async with af.session(backend=af.Scripted(answer)) as flow, flow.state() as s:
        s += af.system("s")
        async with s.user():
            s += "p"
            first, second = s.fork(2)
            first += "1"
            first.end()
            first += af.assistant("a")
            leaf = second.fork(1)[0]
            leaf += "3"
            s += "q"
        assert await first.text() == "<system>s</system><user>p1</user><assistant>a</assistant>"
        assert await leaf.messages() == [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "p3"},
        ]
        assert await s.text() == "<system>s</system><user>pq</user>"
        assert (await first.messages())[1:] == [
            {"role": "user", "content": "p1"},
            {"role": "assistant", "content": "a"},
        ]


async def test_a_forked_turn_has_the_same_token_ids():
    engine = FakeEngine()
    async with af.session(backend=engine) as flow, flow.state() as s, flow.state() as plain:
        s += af.system("Be brief.")
        async with s.user():
            s += "the question is"
            branches = s.fork(2)
            s += " mine"
        for branch, text in zip(branches, (" an", " the"), strict=True):
            branch += text
            branch.end()
        plain += af.system("Be brief.")
        async with plain.user():
            plain += "the question is"
            plain.copy()  # a fork ends a run of text, wherever it goes
            plain += " mine"
        assert await s.token_ids() == await plain.token_ids()
        assert await s.text() == await plain.text()
        assert (await branches[0].messages())[-1] == {"role": "user", "content": "the question is an"}
        branches[1] += af.assistant(af.gen("x", max_tokens=4))
        assert (await branches[1].messages())[1:] == [
            {"role": "user", "content": "the question is the"},
            {"role": "assistant", "content": await branches[1]["x"]},
        ]
    assert engine.client.num_calls == 0


async def test_a_block_that_raises_leaves_its_turn_open():
    async with af.session(backend=af.Scripted(answer)) as flow, flow.state() as s:
        with suppress(ZeroDivisionError):
            async with s.user():
                s += "half"
                raise ZeroDivisionError
        with pytest.raises(af.errors.BadArgument, match="the user turn is open"):
            s += af.assistant("x")
        s += " and whole"
        s.end()
        assert await s.messages() == [{"role": "user", "content": "half and whole"}]


@pytest.mark.on_trio
async def test_messages_wait_for_running_gens_and_are_those_of_the_call():
    backend = Stepped(["one two", "three"])
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.assistant("a ", af.gen("x"))
        reading = s.messages()
        received = []

        async def read():
            received.append(await reading)

        flow._link.start_soon(read)
        await backend.allow(1)
        assert not received
        await backend.allow(1)
        s += af.user("later")
        assert received == [[{"role": "assistant", "content": "a one two"}]]


async def test_messages_of_a_failed_state_raise_its_failure():
    async with af.session(backend=af.Scripted([af.errors.EngineFailed("broken")])) as flow, flow.state() as s:
        s += af.assistant(af.gen("x"))
        with pytest.raises(af.errors.EngineFailed, match="broken"):
            await s.messages()


async def test_messages_show_images_in_turns_and_are_read_again():
    url = "https://example.com/a.png"
    async with af.session(backend=af.Scripted(answer)) as flow, flow.state() as s:
        s += af.image("https://example.com/outside.png")
        s += af.user("look: ", af.image(url), "and tell")
        messages = await s.messages()
        assert messages == [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "look: "},
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "and tell"},
                ],
            }
        ]
        async with flow.state() as again:
            again += af.conversation(messages)
            assert await again.text() == "<user>look: <image>and tell</user><assistant>"
            assert (await again.messages())[:1] == messages


@pytest.mark.parametrize("role", ["system", "user", "tool"])
@pytest.mark.parametrize("expression", [af.gen("x"), af.select("x", ["yes"]), af.reply("x")])
async def test_a_generation_right_after_a_turn_is_a_turn_of_its_own(role, expression):
    backend = af.Scripted(lambda call: "yes")
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += getattr(af, NAMES.get(role, role))("a") + expression
        assert await s.text() == f"<{role}>a</{role}><assistant>yes</assistant>"
        assert (await s.messages())[1:] == [{"role": "assistant", "content": "yes"}]
        async with getattr(s, NAMES.get(role, role))():  # none is open
            pass
        branch = s.copy()
        branch += expression  # the fork knows the last turn
        assert (await branch.messages())[-1] == {"role": "assistant", "content": "yes"}


async def test_the_own_turn_of_a_generation_reaches_the_chat_template():
    """An engine gets the same tokens as if the program had written the turn."""
    texts = []
    for turn in (lambda expression: expression, af.assistant):
        async with af.session(backend=FakeEngine()) as flow, flow.state() as s:
            s += af.user("What?") + turn(af.gen("x", max_tokens=8))
            s += af.user("And?") + turn(af.select("y", ["yes", "no"]))
            texts.append(await s.token_ids())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("expression", [af.gen("x"), af.select("x", ["a", "b"]), af.gen("x", schema=int)])
async def test_a_generation_whose_turn_is_unclear_is_rejected(expression):
    observed = Observed(af.Scripted(lambda call: "a"))
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += af.user("q")
        num_ops = len(observed.ops)
        for before in (
            "text",
            "\n",
            s.set("note", "a"),
            af.image("https://example.com/a.png"),
            af.assistant("a"),
        ):
            num_ops = len(observed.ops)
            with pytest.raises(af.errors.BadArgument, match=r"af\.assistant\("):
                s += before + expression
            assert len(observed.ops) == num_ops
        s += af.assistant(af.gen("y"))
        for state in (s, s.copy()):
            with pytest.raises(af.errors.BadArgument, match="assistant's turn"):
                state.add(expression)
        s += "text"
        s += af.user("a turn makes it clear again") + expression


async def test_text_without_turns_is_completed():
    async with af.session(backend=af.Scripted(lambda call: "a")) as flow, flow.state() as s:
        s += "1, " + af.gen("x") + ", " + af.select("y", ["a", "b"]) + af.gen("z")
        assert await s.text() == "1, a, aa"
        s += af.user("?") + af.gen("w")
        assert await s.text() == "1, a, aa<user>?</user><assistant>a</assistant>"
    async with af.session(backend=af.Scripted(lambda call: "a")) as flow, flow.state() as s:
        async with s.user():  # a model that plays the user
            s += "I " + af.gen("x")
        assert await s.text() == "<user>I a</user>"


# Random conversations against a reference model


@dataclass
class PlainState:
    """The reference model: a state as a text and messages."""

    text: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    open_role: str | None = None
    last: str | None = None  # the value of its variable x
    rejects_gen: bool = False  # text or an assistant's turn stands before, outside any turn

    def append(self, piece: str) -> None:
        self.text += piece
        if self.open_role is not None:
            self.messages[-1]["content"] += piece
        elif self.messages:
            self.rejects_gen = True

    def generate(self) -> None:
        is_own = self.open_role is None and bool(self.messages)
        if is_own:
            self.turn("assistant")
        self.last = answer(self.text)
        self.append(self.last)
        if is_own:
            self.turn(None)

    def turn(self, role: str | None) -> None:
        self.rejects_gen = role is None and self.open_role == "assistant"
        if role is None:
            self.text += f"</{self.open_role}>"
        else:
            self.text += f"<{role}>"
            self.messages.append({"role": role, "content": ""})
        self.open_role = role


async def step(kind: str, number: int, states: list[tuple[af.State, PlainState]]) -> None:
    """Does the same to a state and to its reference model."""
    state, plain = states[number % len(states)]
    if kind == "text":
        state.add(f"t{number} ")
        plain.append(f"t{number} ")
    elif kind == "gen":
        if plain.rejects_gen:
            with pytest.raises(af.errors.BadArgument, match=r"turn"):
                state.add(af.gen("x"))
            return
        plain.generate()
        state.add(af.gen("x"))
    elif kind in ("upper", "marker", "sum") and plain.last is not None:
        x, value = state["x"].upper(), plain.last.upper()
        state.add({"upper": x, "marker": f"{x}: {x}", "sum": "(" + x + ")"}[kind])
        plain.append({"upper": value, "marker": f"{value}: {value}", "sum": f"({value})"}[kind])
    elif kind == "set":
        state.set("note", "not part of it")
    elif kind == "fork":
        states.append((state.copy(), copy.deepcopy(plain)))
    elif kind == "turn":
        role = ROLES[number % 4] if plain.open_role is None else None
        plain.turn(role)
        if role is None:
            state.end()
        else:
            await getattr(state, NAMES.get(role, role))().__aenter__()  # its block may outlive the test


KINDS = ["text", "gen", "upper", "marker", "sum", "set", "fork", "turn", "turn"]


@given(
    steps=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 20)), min_size=5, max_size=40),
    unbatched=st.booleans(),
)
async def test_random_conversations_match_the_reference_model(steps, unbatched):
    backend = af.Scripted(answer)
    async with af.session(backend=Unbatched(backend) if unbatched else backend) as flow, flow.state() as root:
        states = [(root, PlainState())]
        for kind, number in steps:
            await step(kind, number, states)
        for state, plain in reversed(states):
            assert await state.messages() == plain.messages
            assert await state.text() == plain.text
    assert backend.generator.num_open == 0
