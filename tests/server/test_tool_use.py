"""Requests with tools: whatever the model would like, calls are valid, and the next request goes on."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import jsonschema
import numpy as np
import pytest
from tool_template_shapes import MARKS, TEMPLATES, TOKENIZER, WITHOUT_TOOLS

from agentflow.constraint import Constraint
from agentflow.errors import BadArgument, NotSupported
from agentflow.sampling import SamplingParams
from agentflow.server.chat_message import CalledTool, Message, ToolSpec
from agentflow.server.chat_template import ChatTemplate
from agentflow.server.completion_request import CompletionRequest, ToolChoice
from agentflow.server.constraint_compilation import compile_constraint
from agentflow.server.core.scheduler import SchedulerConfig
from agentflow.server.engine_client import EngineClient, running_engine
from agentflow.server.fake_runner import FakeRunner
from agentflow.server.token_state import TokenState
from agentflow.server.tool_output import Arguments, CallBegun, Piece, TextPiece
from agentflow.server.tool_use import ToolUse, tool_use
from benchmarks.text_walks import text_under, walk

ALL = {**TEMPLATES, **{name: WITHOUT_TOOLS[name] for name in ("chatml", "inst")}}
WEATHER = ToolSpec(
    "weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Rome", "</tool_call>"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
NOW = ToolSpec("now", "", {"type": "object", "properties": {}})
TREE = ToolSpec(
    "tree",
    "Recursive, so that no machine can keep it.",
    {
        "type": "object",
        "properties": {"of": {"$ref": "#/$defs/node"}},
        "required": ["of"],
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
    },
)
# The first shows the ids that calls were given, the second writes JSON in a way of its own.
UNSTABLE = (TEMPLATES["mistral_with_ids"], TEMPLATES["spaced_hermes"])
REGULAR, ANY = (WEATHER, NOW), (WEATHER, NOW, TREE)
REQUIRED, AUTO = ToolChoice("required"), ToolChoice("auto")
USER = Message("user", "What is the weather?")


def request(choice: ToolChoice = AUTO, tools: tuple[ToolSpec, ...] = REGULAR, **more) -> CompletionRequest:
    given = {
        "prompt": (USER,),
        "params": SamplingParams(max_tokens=200),
        "tools": tools,
        "tool_choice": choice,
    }
    return CompletionRequest(**(given | more))


def calls_of(pieces: Sequence[Piece]) -> list[CalledTool]:
    found: list[CalledTool] = []
    for piece in pieces:
        if isinstance(piece, CallBegun):
            found.append(CalledTool(piece.id, piece.name, ""))
        elif isinstance(piece, Arguments):
            found[-1] = replace(found[-1], arguments=found[-1].arguments + piece.text)
    return found


def prose_of(pieces: Sequence[Piece]) -> str:
    return "".join([piece.text for piece in pieces if isinstance(piece, TextPiece)])


def check(calls: Sequence[CalledTool], tools: Sequence[ToolSpec] = ANY) -> None:
    known = {tool.name: tool for tool in tools}
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), known[call.name].parameters)


CHOICES = {
    "required": REQUIRED,
    "one": ToolChoice("required", parallel=False),
    "named": ToolChoice("required", name="weather"),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("chosen", CHOICES)
@pytest.mark.parametrize("tools", [REGULAR, ANY], ids=["regular", "any"])
def test_texts_under_a_required_choice_are_calls(name, chosen, tools):
    choice = CHOICES[chosen]
    use = tool_use(ALL[name], request(choice, tools))
    compiled = compile_constraint(use.constraint.check())
    assert (compiled.form == "fsm") == (tools is REGULAR or choice.name is not None)
    counts = set()
    for seed in range(25):
        text = walk(text_under(compiled), random.Random(seed))
        if text is None:
            continue
        output = use.output()
        pieces = output.push(text.decode()) + output.finish()
        assert prose_of(pieces) == ""
        calls = calls_of(pieces)
        check(calls)
        counts.add(len(calls))
        assert choice.name is None or {call.name for call in calls} == {"weather"}
    assert counts == {1} or (chosen == "required" and use.form.allows_several and min(counts) == 1)


@pytest.mark.parametrize("name", [name for name in ALL if name != "llama"])
def test_what_begins_as_a_call_is_one(name):
    use = tool_use(ALL[name], request(AUTO, ANY))
    compiled = compile_constraint(use.constraint.check())
    num_calls = 0
    for seed in range(20):
        text = walk(text_under(compiled), random.Random(seed), prefix=f"So {use.form.begin}".encode())
        if text is None:
            continue
        output = use.output()
        pieces = output.push(text.decode()) + output.finish()
        check(calls_of(pieces))
        num_calls += output.num_calls
        assert pieces[0].text.startswith("So")
        assert output.num_calls >= 1
    assert num_calls >= 5


def test_one_call_in_prose_where_only_one_is_asked_for():
    use = tool_use(TEMPLATES["hermes"], request(ToolChoice("auto", parallel=False)))
    assert use.constraint.max_tags == 1
    assert tool_use(TEMPLATES["hermes"], request(AUTO)).constraint.max_tags is None


# On the engine, whose fake model likes marks, JSON and its end, in no order.

LIKED = [TOKENIZER.id_of(mark) for mark in ("<tool_call>", "<tool_call>", "[TOOL_CALLS]")]
LIKED += [*TOKENIZER.encode('<{}[]""""'), 1]
PLAIN = [i for i in range(len(MARKS), TOKENIZER.vocab_size) if TOKENIZER.decode([i]).isalpha()]
CALL = TOKENIZER.encode("<call>")


def next_token(tokens: Sequence[int]) -> int:
    for begun in range(len(CALL) - 1, 0, -1):
        if list(tokens[-begun:]) == CALL[:begun]:
            return CALL[begun]
    number = zlib.crc32(np.array(tokens, dtype=np.int64).tobytes())
    return LIKED[number % len(LIKED)] if number % 3 else PLAIN[number % len(PLAIN)]


@asynccontextmanager
async def engine() -> AsyncIterator[EngineClient]:
    fake = FakeRunner(
        num_slots=65536,
        max_context=4096,
        vocab_size=TOKENIZER.vocab_size,
        next_token=next_token,
        end_token_ids=(1,),
    )
    async with running_engine(lambda: (fake, TOKENIZER), SchedulerConfig()) as client:
        yield client


@dataclass
class Told:
    prompt: TokenState
    text: str
    ids: list[int]
    pieces: list[Piece]
    reason: str


def state_for(use: ToolUse, template: ChatTemplate) -> TokenState:
    state = TokenState(TOKENIZER, template)
    state.tools(use.tools)
    for message in use.messages:
        state.turn(message)
    state.begin_role("assistant")
    return state


async def answer(
    client: EngineClient, template: ChatTemplate, asked: CompletionRequest, jumps: bool = True
) -> Told:
    use = tool_use(template, asked)
    state, output = state_for(use, template), use.output()
    pieces: list[Piece] = []
    heard: list[str] = []

    def on_text(text: str) -> None:
        heard.append(text)
        pieces.extend(output.push(text))

    end = await client.generate(
        state.ids(),
        asked.params,
        seed=0,
        on_text=on_text,
        constraint=None if use.constraint is None else compile_constraint(use.constraint),
        jump_forward=jumps,
    )
    pieces += output.finish(end.text[len("".join(heard)) :])
    return Told(state, end.text, end.token_ids, pieces, end.finish_reason)


QUESTIONS = tuple(
    Message("user", f"Weather in {n}?") for n in ("Oslo", "Rome", "Bergen", "Pisa", "Bari", "Turku")
)


@pytest.mark.anyio
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("chosen", [*CHOICES, "auto"])
async def test_the_engine_gives_valid_calls(name, chosen):
    template, choice = ALL[name], CHOICES.get(chosen, AUTO)
    num_calls = num_gone_on = 0
    async with engine() as client:
        for number, question in enumerate(QUESTIONS):
            tools = ANY if number % 2 else REGULAR
            asked = request(choice, tools, prompt=(Message("system", "Be brief."), question))
            told = await answer(client, template, asked, jumps=number != 2)
            calls = calls_of(told.pieces)
            if told.reason == "length":
                continue
            check(calls)
            num_calls += len(calls)
            if chosen != "auto":
                assert calls
                assert prose_of(told.pieces) == ""
            num_gone_on += goes_on(template, asked, told, calls)
    assert num_calls > 0 or (name, chosen) == ("llama", "auto")
    assert chosen == "auto" or num_gone_on or template in UNSTABLE


def goes_on(
    template: ChatTemplate, asked: CompletionRequest, told: Told, calls: Sequence[CalledTool]
) -> None:
    """The next request begins with the text of this one and its answer, where the notation has a place for
    all of that (and says whether it has): prose only in front, and none beside some notations."""
    use = tool_use(template, asked)
    prose = prose_of(told.pieces)
    says_prose = use.form.before + use.form.mark if prose else ""
    has_no_place = bool(prose) and template in (TEMPLATES["mistral"], TEMPLATES["llama"])
    ends_with_call = calls and all(
        not isinstance(p, TextPiece) for p in told.pieces[calls_begin(told.pieces) :]
    )
    if not ends_with_call or has_no_place or template in UNSTABLE:
        return False
    if not told.text.startswith(prose + says_prose) or prose != prose.strip():
        return False
    said = Message("assistant", prose, tool_calls=tuple(calls))
    results = [Message("tool", "rain", tool_call_id=call.id, name=call.name) for call in calls]
    later = tool_use(template, replace(asked, prompt=(*asked.prompt, said, *results)))
    text = state_for(later, template).text_view()
    if template is ALL["inst"]:  # which writes a space before each answer, the model's own or not
        text = text.replace("[/INST] ", "[/INST]")
    assert text.startswith(told.prompt.text_view() + told.text)
    return True


def calls_begin(pieces: Sequence[Piece]) -> int:
    return next((n for n, piece in enumerate(pieces) if isinstance(piece, CallBegun)), len(pieces))


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["hermes", "chatml"])
async def test_a_state_that_goes_on_keeps_the_ids(name):
    """A session that stays open appends the result to the call as it was generated."""
    async with engine() as client:
        told = await answer(client, ALL[name], request(REQUIRED))
    state = told.prompt
    expected = state.ids() + told.ids
    state.generated(told.ids, told.text)
    state.end_role()
    state.turn(Message("tool" if name == "hermes" else "user", "rain"))
    state.begin_role("assistant")
    assert state.ids()[: len(expected)] == expected
    assert state.num_rerendered_tokens == 0


@pytest.mark.anyio
@pytest.mark.parametrize("jumps", [True, False])
async def test_a_special_mark_is_written_as_its_token(jumps):
    """Forced as well as sampled."""
    mark = TOKENIZER.id_of("[TOOL_CALLS]")
    assert mark in TOKENIZER.special_ids
    async with engine() as client:
        told = await answer(client, TEMPLATES["mistral"], request(REQUIRED), jumps)
        assert told.text.startswith("[TOOL_CALLS] [{")
        if jumps:
            assert told.ids[0] == mark
        free = [
            await answer(client, TEMPLATES["mistral"], request(AUTO, prompt=(question,)), jumps)
            for question in QUESTIONS
        ]
    assert any(mark in one.ids for one in free)
    for one in free:
        assert one.ids.count(mark) <= one.text.count("[TOOL_CALLS]")


@pytest.mark.anyio
async def test_a_call_that_is_the_whole_answer_takes_few_steps():
    async with engine() as client:
        asked = request(ToolChoice("required", name="now"))
        told = await answer(client, TEMPLATES["hermes"], asked)
        stats = await client.stats()
    assert told.text == '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert stats.steps == 0  # all of it is forced


@pytest.mark.parametrize("name", ALL)
def test_no_tool_may_be_called_and_the_model_knows_of_all(name):
    constraint = Constraint("regex", "[a-z]+")
    use = tool_use(ALL[name], request(ToolChoice("none"), constraint=constraint))
    assert use.constraint == constraint
    assert "Tells the weather." in state_for(use, ALL[name]).text_view()
    output = use.output()
    text = use.form.begin + '{"name": "weather", "arguments": {}}'
    assert prose_of(output.push(text) + output.finish()) == text


def test_a_bare_call_is_read_though_nothing_constrains_it():
    use = tool_use(TEMPLATES["llama"], request(AUTO))
    assert use.constraint is None
    good = '{"name": "weather", "parameters": {"city": "Oslo", "days": 1}}'
    for text, num_calls in ((good, 1), ("So: " + good, 0), ('{"name": "weather"}', 0), ("{a}", 0)):
        output = use.output()
        pieces = output.push(text) + output.finish()
        assert (output.num_calls, prose_of(pieces)) == (num_calls, "" if num_calls else text)


def test_a_conversation_without_tools_stays_as_it_is():
    use = tool_use(TEMPLATES["hermes"], request(tools=()))
    assert (use.messages, use.tools, use.constraint) == ((USER,), (), None)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"prompt": "text"}, NotSupported, "need a conversation"),
        ({"prompt": (1, 2)}, NotSupported, "need a conversation"),
        ({"tools": (NOW, NOW)}, BadArgument, "two tools have one name: now, now"),
        ({"tools": (), "choice": REQUIRED}, BadArgument, "there are no tools"),
        ({"choice": ToolChoice("required", name="x")}, BadArgument, "tool 'x' is to be called, but"),
        ({"constraint": Constraint("regex", "a")}, NotSupported, "cannot be kept beside tools"),
    ],
)
def test_requests_that_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        tool_use(TEMPLATES["hermes"], request(**wrong))


def test_a_result_is_given_the_name_of_what_was_called():
    """Some templates refuse a result without one, and clients leave it out."""
    call = CalledTool("call_1", "weather", "{}")
    called = Message("assistant", "", tool_calls=(call,))
    results = [Message("tool", "rain", tool_call_id=one) for one in ("call_1", "other")]
    use = tool_use(TEMPLATES["hermes"], request(prompt=(USER, called, *results)))
    assert [message.name for message in use.messages] == [None, None, "weather", None]


def test_a_model_without_a_template_has_no_tools():
    with pytest.raises(NotSupported, match="no chat template"):
        tool_use(ChatTemplate(None), request())
