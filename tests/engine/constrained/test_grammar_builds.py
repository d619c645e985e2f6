"""Grammars are built while the engine runs steps: only requests that need one wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import anyio
import numpy as np
import pytest
from support.counted_lines import counted_lines
from support.engine.requests import request_of
from support.engine.stepped_engine import SteppedEngine
from support.faults import has_param
from support.holds import until
from support.plain_model import plain_model_engine
from support.plain_model import runner as plain_runner
from support.reasoning_models import CHANNEL_MODEL as CHANNELS

from agentflow.engine.client import EngineClient
from agentflow.engine.constrained import grammar_cache
from agentflow.engine.constrained.constrained_request import constrained_request
from agentflow.engine.constrained.grammar_builder import BuiltGrammar, GrammarBuilder
from agentflow.engine.constrained.grammar_cache import GrammarCache
from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.dfa import build_dfa
from agentflow.engine.grammar.grammar import Matcher
from agentflow.engine.grammar.llguidance import LlguidanceGrammar
from agentflow.engine.grammar.regex import parse_regex
from agentflow.engine.messages import Abort, Failed, Finished
from agentflow.engine.request import Origin, Submit
from agentflow.engine.text.channels import ANSWER_HEAD, NEXT_MESSAGE, REASONING_HEAD
from agentflow.engine.text.reasoning import ReasoningFormat
from agentflow.errors import EngineFailed, RequestRefused
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.sampling import SamplingParams

SLOW = compile_constraint(Constraint("grammar", 'start: "slow"'))
BAD = CompiledConstraint("bad", "llguidance", b"start: <|im_start|>")


def word(text: str) -> CompiledConstraint:
    return CompiledConstraint(text, "dfa", build_dfa(parse_regex(text)).to_bytes())


async def generate(client: EngineClient, constraint: CompiledConstraint | None) -> Finished:
    params = SamplingParams(max_tokens=20)
    return await client.generate([5, 6], params, seed=0, on_text=lambda text: None, constraint=constraint)


class Held:
    """Builds of ``SLOW`` wait until they may go on."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    hold = Held()

    class SlowGrammar(LlguidanceGrammar):
        def __init__(self, payload: str, *more: object) -> None:
            if payload == SLOW.payload.decode():
                hold.has_begun.set()
                hold.may_end.wait()
            super().__init__(payload, *more)

    monkeypatch.setattr(grammar_cache, "LlguidanceGrammar", SlowGrammar)
    yield hold
    hold.may_end.set()


@pytest.mark.anyio
async def test_f9a_other_requests_run_while_a_grammar_is_built(held: Held) -> None:
    ends: list[str] = []

    async def slow(client: EngineClient) -> None:
        ends.append((await generate(client, SLOW)).text)

    async with plain_model_engine() as client:
        await generate(client, word("known"))
        async with anyio.create_task_group() as group:
            group.start_soon(slow, client)
            group.start_soon(slow, client)
            await until(held.has_begun.is_set)
            assert (await generate(client, None)).output_tokens
            assert (await generate(client, word("known"))).text == "known"
            stats = await client.stats()
            assert (stats.waiting, stats.running, stats.in_use_slots) == (2, 0, 0)
            assert not ends
            held.may_end.set()
    assert ends == ["slow", "slow"]


@pytest.mark.anyio
async def test_f9b_a_request_that_waits_for_its_grammar_can_be_aborted(held: Held) -> None:
    async with plain_model_engine() as client:
        async with anyio.create_task_group() as group:
            group.start_soon(generate, client, SLOW)
            await until(held.has_begun.is_set)
            group.cancel_scope.cancel()
        assert (await client.stats()).waiting == 0
        held.may_end.set()
        assert (await generate(client, SLOW)).text == "slow"


@pytest.mark.anyio
async def test_f9c_a_grammar_that_cannot_be_built_fails_its_requests_only() -> None:
    async def fail(client: EngineClient) -> None:
        with pytest.raises(RequestRefused, check=has_param("constraint")):
            await generate(client, BAD)

    async with plain_model_engine() as client, anyio.create_task_group() as group:
        group.start_soon(fail, client)
        group.start_soon(fail, client)
        assert (await generate(client, word("good"))).text == "good"


def test_f9d_tenants_take_turns_at_building() -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    built: list[str] = []
    is_done = threading.Event()
    grammar = LlguidanceGrammar.__new__(LlguidanceGrammar)  # any object: it is passed on

    def make(constraint: CompiledConstraint) -> LlguidanceGrammar:
        begun.set()
        may_go_on.wait()
        return grammar

    def deliver(end: BuiltGrammar) -> None:
        built.append(end.key)
        if len(built) == 5:
            is_done.set()

    builder = GrammarBuilder(make, deliver)
    builder.build(word("a1"), "a")
    begun.wait()
    for key in ("a2", "a3", "dropped", "a4"):
        builder.build(word(key), "a")
    builder.build(word("b1"), "b")
    builder.cancel("dropped")
    may_go_on.set()
    is_done.wait()
    builder.close()
    assert built == ["a1", "a2", "b1", "a3", "a4"]


def test_a_grammar_for_which_no_thread_can_be_started_fails_its_requests_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    asked = Submit(1, [5, 6], SamplingParams(max_tokens=20), constraint=word("yes"))
    [[failed]] = SteppedEngine(plain_runner(), None).run(asked)
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.code) == (1, EngineFailed.code)


def work_of_aborts(num: int) -> int:
    """The lines that the engine executes to abort requests whose grammars are not built, each another one."""
    engine = SteppedEngine(plain_runner(), None).engine
    engine._builder._thread = threading.current_thread()  # builds nothing
    for number in range(1, num + 1):
        constraint = CompiledConstraint(f"key {number}", "llguidance", b"start: 'a'")
        params = SamplingParams(max_tokens=20)
        engine.send(Submit(number, [5], params, constraint=constraint, origin=Origin(tenant="ann")))
    while not engine._inbox.empty():
        engine.take_messages()
    assert len(engine._requests) == num
    for number in range(1, num + 1):
        engine.send(Abort(number))
    with counted_lines() as lines:
        while not engine._inbox.empty():
            engine.take_messages()
    assert not engine._requests
    assert not engine._unready
    return lines.num


def test_the_work_of_aborts_grows_with_the_requests_not_with_their_square() -> None:
    assert work_of_aborts(400) < 3 * work_of_aborts(200)


def test_f9e_reasoning_in_channels_keep_the_grammar_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the cache drops it meanwhile, whose payload the engine has only once."""
    monkeypatch.setattr(grammar_cache, "MAX_GRAMMARS", 1)
    grammars = GrammarCache(CHANNELS.tokenizer, CHANNELS.tokenizer.vocab_size)
    grammars.grammar(word("yes"))
    reasoning_format = ReasoningFormat(REASONING_HEAD, "<|end|>", is_open=False, answer=ANSWER_HEAD)
    params = SamplingParams(max_tokens=200)
    known = CompiledConstraint("yes", "dfa", b"")
    message = Submit(1, [5], params, constraint=known, jump_forward=False, reasoning_format=reasoning_format)
    request = request_of(1, np.array([5], dtype=np.int32), 200, params)
    text = constrained_request(request, message, grammars, CHANNELS.tokenizer)
    text.begin(())
    grammars.grammar(word("other"))
    written = f"{REASONING_HEAD}Is it so? It is.{NEXT_MESSAGE}{ANSWER_HEAD}yes"
    for token_id in CHANNELS.tokenizer.encode_written(written):
        assert not text.is_complete()
        text.read(token_id)
        text.update()
    assert text.is_complete()


def test_f37_reasoning_in_channels_needs_one_matcher_for_the_answer() -> None:
    num_made = 0

    class Counting(GrammarCache):
        def matchers(self, constraint: CompiledConstraint) -> Callable[[], Matcher]:
            make = super().matchers(constraint)

            def made() -> Matcher:
                nonlocal num_made
                num_made += 1
                return make()

            return made

    grammars = Counting(CHANNELS.tokenizer, CHANNELS.tokenizer.vocab_size)
    reasoning_format = ReasoningFormat(REASONING_HEAD, "<|end|>", is_open=False, answer=ANSWER_HEAD)
    params = SamplingParams(max_tokens=200)
    message = Submit(1, [5], params, constraint=word("yes"), reasoning_format=reasoning_format)
    request = request_of(1, np.array([5], dtype=np.int32), 200, params)
    text = constrained_request(request, message, grammars, CHANNELS.tokenizer)
    text.begin(())
    for token_id in CHANNELS.tokenizer.encode_written(f"{REASONING_HEAD}Is it so? It is.{NEXT_MESSAGE}"):
        text.read(token_id)
        text.update()
    assert num_made == 1
