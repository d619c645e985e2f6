"""Tool calls on the engine are valid for any logits of the model, and the next request continues them."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
from support.engine.tool_requests import (
    ALL,
    ANY,
    AUTO,
    CHOICES,
    REGULAR,
    REQUIRED,
    UNSTABLE,
    calls_of,
    check,
    compile_once,
    prose_of,
    request,
    state_for,
    use_of,
)
from support.engine.tool_template_shapes import MARKS, TEMPLATES, TOKENIZER

from agentflow.engine.client import EngineClient, running_engine
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.state.token_state import TokenState
from agentflow.protocol.chat import CallBegun, CalledTool, Message, ReplyPiece, TextPiece, ToolChoice
from agentflow.server.completion.request import CompletionRequest

# The fake model likes marks, JSON and its end, in no order.

LIKED = [TOKENIZER.find_id(mark) for mark in ("<tool_call>", "<tool_call>", "[TOOL_CALLS]")]
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
    async with running_engine(lambda: (fake, TOKENIZER, SchedulerConfig())) as client:
        yield client


@dataclass
class Answered:
    prompt: TokenState
    text: str
    ids: list[int]
    pieces: list[ReplyPiece]
    reason: str


async def answer(
    client: EngineClient, template: ChatTemplate, asked: CompletionRequest, jumps: bool = True
) -> Answered:
    use = use_of(template, asked)
    state, output = state_for(use, template), use.output()
    pieces: list[ReplyPiece] = []
    deltas: list[str] = []

    def on_text(text: str) -> None:
        deltas.append(text)
        pieces.extend(output.push(text))

    end = await client.generate(
        state.ids(),
        asked.params,
        seed=0,
        on_text=on_text,
        constraint=None if use.constraint() is None else compile_once(use.constraint()),
        jump_forward=jumps,
    )
    pieces += output.finish(end.text[len("".join(deltas)) :])
    return Answered(state, end.text, end.token_ids, pieces, end.finish_reason)


QUESTIONS = tuple(Message("user", f"Weather in {n}?") for n in ("Oslo", "Rome", "Bergen", "Pisa"))


@pytest.mark.anyio
@pytest.mark.trio_in_full
@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        # The choice decides on the constraint; with and without one, each template has its notation.
        pytest.param(
            name,
            chosen,
            marks=[] if chosen in ("auto", "required") or name in ("hermes", "mistral") else pytest.mark.full,
        )
        for name in ALL
        for chosen in (*CHOICES, "auto")
    ],
)
async def test_the_engine_gives_valid_calls(name, chosen):
    template, choice = ALL[name], CHOICES.get(chosen, AUTO)
    num_calls = num_gone_on = 0
    async with engine() as client:
        for number, question in enumerate(QUESTIONS):
            tools = ANY if number % 2 else REGULAR
            asked = request(choice, tools, prompt=(Message("system", "Be brief."), question))
            answered = await answer(client, template, asked, jumps=number != 2)
            calls = calls_of(answered.pieces)
            if answered.reason == "length":
                continue
            check(calls)
            num_calls += len(calls)
            if chosen != "auto":
                assert calls
                assert prose_of(answered.pieces) == ""
            num_gone_on += goes_on(template, asked, answered, calls)
    assert num_calls > 0 or (name, chosen) == ("llama", "auto")
    assert chosen == "auto" or num_gone_on or template in UNSTABLE


def goes_on(
    template: ChatTemplate, asked: CompletionRequest, answered: Answered, calls: Sequence[CalledTool]
) -> None:
    """The next request begins with the text of this one and its answer, where the notation has a place for
    all of that (and says whether it has): prose only in front, and none next to some notations."""
    use = use_of(template, asked)
    prose = prose_of(answered.pieces)
    says_prose = use.form.before + use.form.mark if prose else ""
    has_no_place = bool(prose) and template in (TEMPLATES["mistral"], TEMPLATES["llama"])
    ends_with_call = calls and all(
        not isinstance(p, TextPiece) for p in answered.pieces[calls_begin(answered.pieces) :]
    )
    if not ends_with_call or has_no_place or template in UNSTABLE:
        return False
    if not answered.text.startswith(prose + says_prose) or prose != prose.strip():
        return False
    said = Message("assistant", prose, tool_calls=tuple(calls))
    results = [Message("tool", "rain", tool_call_id=call.id, name=call.name) for call in calls]
    later = use_of(template, replace(asked, prompt=(*asked.prompt, said, *results)))
    text = state_for(later, template).text_view()
    if template is ALL["inst"]:  # which writes a space before each answer, the model's own or not
        text = text.replace("[/INST] ", "[/INST]")
    assert text.startswith(answered.prompt.text_view() + answered.text)
    return True


def calls_begin(pieces: Sequence[ReplyPiece]) -> int:
    return next((n for n, piece in enumerate(pieces) if isinstance(piece, CallBegun)), len(pieces))


@pytest.mark.anyio
@pytest.mark.trio_in_full
@pytest.mark.parametrize("name", ["hermes", "chatml"])
async def test_a_state_that_goes_on_keeps_the_ids(name):
    """A session that stays open appends the result to the generated call."""
    async with engine() as client:
        answered = await answer(client, ALL[name], request(REQUIRED))
    state = answered.prompt
    expected = state.ids() + answered.ids
    state.generated(answered.ids, answered.text)
    state.end_role()
    state.turn(Message("tool" if name == "hermes" else "user", "rain"))
    state.begin_role("assistant")
    assert state.ids()[: len(expected)] == expected
    assert state.num_rerendered_tokens == 0


@pytest.mark.anyio
@pytest.mark.trio_in_full
@pytest.mark.parametrize("jumps", [True, False])
async def test_a_special_mark_is_written_as_its_token(jumps):
    """Forced as well as sampled."""
    mark = TOKENIZER.find_id("[TOOL_CALLS]")
    assert mark in TOKENIZER.special_ids
    async with engine() as client:
        answered = await answer(client, TEMPLATES["mistral"], request(REQUIRED), jumps)
        assert answered.text.startswith("[TOOL_CALLS] [{")
        if jumps:
            assert answered.ids[0] == mark
        free = [
            await answer(client, TEMPLATES["mistral"], request(AUTO, prompt=(question,)), jumps)
            for question in QUESTIONS
        ]
    assert any(mark in one.ids for one in free)
    for one in free:
        assert one.ids.count(mark) <= one.text.count("[TOOL_CALLS]")


@pytest.mark.anyio
@pytest.mark.trio_in_full
async def test_a_call_that_is_the_whole_answer_takes_few_steps():
    async with engine() as client:
        asked = request(ToolChoice("required", name="now"))
        answered = await answer(client, TEMPLATES["hermes"], asked)
        stats = await client.stats()
    assert answered.text == '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert stats.steps == 0  # all of it is forced
