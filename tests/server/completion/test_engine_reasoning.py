"""Reasoning of reasoning models on the engine: apart from the answer, under a budget, before a constraint."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.direct_compiler import direct_compiler
from support.fake_engine import FakeEngine
from support.reasoning_models import (
    CHANNEL_MODEL,
    DEEPSEEK_MODEL,
    MODELS,
    QWEN_MODEL,
    SPELLED_MODEL,
    ReasoningModel,
)
from support.server.module_servers import module_fixture

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.messages import FromEngine
from agentflow.engine.process.request_journal import RequestJournal
from agentflow.engine.request import Submit
from agentflow.engine.simulator.fake_runner import NextToken
from agentflow.protocol.chat import CalledTool, Message, ToolChoice, ToolSpec
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.completion.completion import completing
from agentflow.server.completion.engine_run import prompt_ids
from agentflow.server.completion.request import (
    Answer,
    CompletionDelta,
    CompletionRequest,
    ReasoningDelta,
    TextDelta,
    join_answers,
)

pytestmark = pytest.mark.anyio

REASONING, ANSWER = "It is a greeting. I stop.", "Hello. I stop."
SCRIPT = f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"
JSON = Constraint(
    "schema", '{"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}'
)
JSON_SCRIPT = '<think>\nIt may be {"a": "c"}.\n</think>\n\n{"a": "b"}'
LOOK = ToolSpec("look", "Looks.", {"type": "object", "properties": {}, "additionalProperties": False})
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
EACH = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@asynccontextmanager
async def generator_of(model: ReasoningModel, **options) -> AsyncIterator[EngineGenerator]:
    engine = FakeEngine(runner=model.runner(**options), tokenizer=model.tokenizer)
    async with engine.open_client() as client, direct_compiler() as compiler:
        yield EngineGenerator(client, model.template, compiler=compiler)
        await engine.assert_idle()


def asking(script: str, max_tokens: int = 200, **fields) -> CompletionRequest:
    params = SamplingParams(max_tokens=max_tokens, **fields.pop("params", {}))
    return CompletionRequest((Message("user", script),), params, **fields)


async def deltas_of(generator: EngineGenerator, request: CompletionRequest) -> list[CompletionDelta]:
    async with completing(generator, request) as completion:
        return await completion.rest()


async def ask(generator: EngineGenerator, request: CompletionRequest) -> Answer:
    [answer] = join_answers(await deltas_of(generator, request), 1)
    return answer


async def ask_each(generator: EngineGenerator, requests: list[CompletionRequest]) -> tuple[Answer, ...]:
    """Asks all requests at the same time, so that they share the engine's steps."""
    return await anyio.gather(*[ask(generator, request) for request in requests])


@EACH
async def test_reasoning_are_apart_from_the_answer_and_stops_are_of_the_answer(model: ReasoningModel) -> None:
    async with generator_of(model) as generator:
        answer = await ask(generator, asking(SCRIPT))
        assert (answer.reasoning, answer.text, answer.finish_reason) == (REASONING, ANSWER, "stop")
        assert 0 < answer.usage.reasoning_tokens < len(answer.token_ids) < answer.usage.output_tokens
        for stop in ("stop", "\n\n", "Hello"):
            stopped = await ask(generator, asking(SCRIPT, params={"stop": (stop,)}))
            assert (stopped.reasoning, stopped.text) == (REASONING, ANSWER.partition(stop)[0])
        truncated = await ask(generator, asking(SCRIPT, max_tokens=13))
        assert (truncated.text, truncated.finish_reason) == ("", "length")
        assert REASONING.startswith(truncated.reasoning)
        assert truncated.usage.reasoning_tokens == 13


@EACH
async def test_a_budget_ends_reasoning_at_once_and_the_answer_follows(model: ReasoningModel) -> None:
    async with generator_of(model) as generator:
        free = await ask(generator, asking(SCRIPT))
        end = model.tokenizer.encode_written("</think>")
        begin = 0 if model is DEEPSEEK_MODEL else len(model.tokenizer.encode_written("<think>"))
        gap = len(model.tokenizer.encode_written(SCRIPT.partition("</think>")[2].partition(ANSWER)[0]))
        inside = free.usage.reasoning_tokens - begin - len(end) - gap  # before the last mark
        for budget in (0, 1, inside - 1, inside, inside + 100):
            answer = await ask(generator, asking(SCRIPT, reasoning_budget=budget))
            assert answer.text == ANSWER
            assert REASONING.startswith(answer.reasoning)
            written = begin + min(budget, inside) + len(end)
            assert answer.usage.reasoning_tokens == (written + gap if budget >= inside else written)
            assert (answer.reasoning == REASONING) == (budget >= inside - 1)
        # In the mark that the budget appends, and in one token before reasoning.
        for stop in ("/think", "</", *(["think", ">"] if model is not SPELLED_MODEL else [])):
            answer = await ask(generator, asking(SCRIPT, reasoning_budget=1, params={"stop": (stop,)}))
            assert (answer.text, answer.finish_reason) == (ANSWER, "stop")
        # Without room for the mark, the limit of the output ends it.
        assert (
            await ask(generator, asking(SCRIPT, max_tokens=1, reasoning_budget=0))
        ).finish_reason == "length"


@EACH
async def test_thinking_can_be_turned_off(model: ReasoningModel) -> None:
    async with generator_of(model) as generator:
        answer = await ask(generator, asking(SCRIPT, reasons=False))
        assert (answer.reasoning, answer.text) == ("", ANSWER)
        given_on = asking(SCRIPT, template_values={"enable_thinking": True}, reasons=False)
        assert (await ask(generator, given_on)).reasoning == ""  # a budget of 0
        off = asking(SCRIPT, template_values={"enable_thinking": False})
        assert (await ask(generator, off)).reasoning == (REASONING if model is DEEPSEEK_MODEL else "")
        if model is not DEEPSEEK_MODEL:
            shown = model.tokenizer.decode(await prompt_ids(generator, asking(SCRIPT, reasons=False)))
            assert shown.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("budget", [None, 0, 3])
@pytest.mark.parametrize("model", [QWEN_MODEL, DEEPSEEK_MODEL], ids=["qwen", "deepseek"])
async def test_a_constraint_begins_with_the_answer(
    model: ReasoningModel, budget: int | None, jumps: bool
) -> None:
    form = Constraint(JSON.kind, JSON.source, jump_forward=jumps)
    async with generator_of(model) as generator:
        for params in ({}, {"logprobs": True}):
            answer = await ask(
                generator, asking(JSON_SCRIPT, constraint=form, reasoning_budget=budget, params=params)
            )
            assert json.loads(answer.text) == {"a": "b"}
            reasoning = 'It may be {"a": "c"}.'
            assert answer.reasoning == reasoning if budget is None else reasoning.startswith(answer.reasoning)
            assert len(answer.tokens) == (len(answer.token_ids) if params else 0)
        # A model that ends in its reasoning goes on with the form.
        ended = await ask(generator, asking("<think>\nNo.", constraint=form, max_tokens=60))
        assert (ended.reasoning, ended.finish_reason) == (
            "No." if budget is None else ended.reasoning,
            "stop",
        )
        assert json.loads(ended.text)
        without = await ask(generator, asking('{"a": "c"}', constraint=form, reasons=False))
        assert (without.reasoning, json.loads(without.text)) == ("", {"a": "c"})


async def test_without_a_token_for_the_mark_a_constraint_begins_at_once() -> None:
    async with generator_of(SPELLED_MODEL) as generator:
        answer = await ask(generator, asking(JSON_SCRIPT, constraint=JSON))
        assert (answer.reasoning, json.loads(answer.text)) == ("", {"a": "b"})


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_calls_follow_reasoning_that_have_marks_of_calls(mode) -> None:
    script = f"<think>\nShould I {CALL}?\n</think>\n\n{CALL}"
    tools = {"tools": (LOOK,), "tool_choice": ToolChoice(mode)}
    async with generator_of(QWEN_MODEL) as generator:
        answer = await ask(generator, asking(script, **tools))
        assert answer.reasoning == f"Should I {CALL}?"
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("look", "{}")]
        assert (answer.text, answer.finish_reason) == ("", "tool_calls")
        cut = await ask(generator, asking(script, max_tokens=20, **tools))
        assert (cut.tool_calls, cut.text, cut.finish_reason) == ((), "", "length")
        turns = (
            Message("user", script),
            Message(
                "assistant", "", tool_calls=(CalledTool("c1", "look", "{}"),), reasoning=answer.reasoning
            ),
            Message("tool", "A bear.", tool_call_id="c1", name="look"),
        )
        again = CompletionRequest(turns, SamplingParams(max_tokens=5), tools=(LOOK,))
        ids = await prompt_ids(generator, again)
    tokenizer = QWEN_MODEL.tokenizer
    assert f"<think>\nShould I {CALL}?\n</think>" in tokenizer.decode(ids)
    assert ids.count(tokenizer.find_id("<think>")) == 1


async def test_several_answers_with_log_probabilities() -> None:
    request = asking(SCRIPT, n=3, params={"logprobs": True, "top_logprobs": 2})
    async with generator_of(QWEN_MODEL) as generator:
        deltas = await deltas_of(generator, request)
    for answer in join_answers(deltas, 3):
        assert (answer.reasoning, answer.text) == (REASONING, ANSWER)
        assert [token.token_id for token in answer.tokens] == [*answer.token_ids]
    of_answers = [token for delta in deltas if isinstance(delta, TextDelta) for token in delta.tokens]
    of_reasoning = [token for delta in deltas if isinstance(delta, ReasoningDelta) for token in delta.tokens]
    assert len(of_reasoning) > len(of_answers) > 0


CheckResumed = Callable[[CompletionRequest, int], None]


@contextmanager
def resuming(model: ReasoningModel) -> Iterator[CheckResumed]:
    """``check_resumed`` on one engine, for all examples of a test."""
    with (
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(generator_of(model)) as generator,
    ):
        whole: dict[str, tuple[Answer, Journal]] = {}
        yield lambda request, num_tokens: portal.call(check_resumed, generator, whole, request, num_tokens)


check_qwen_resumed = module_fixture(resuming, QWEN_MODEL)


@given(num_tokens=st.integers(1, 60), budget=st.sampled_from([None, 0, 1, 4]), is_constrained=st.booleans())
def test_a_request_that_is_resumed_goes_on_where_it_was(
    check_qwen_resumed: CheckResumed, num_tokens: int, budget: int | None, is_constrained: bool
) -> None:
    """An engine process dies after it has sent some of the output."""
    constraint = JSON if is_constrained else None
    script = JSON_SCRIPT if is_constrained else SCRIPT
    check_qwen_resumed(asking(script, constraint=constraint, reasoning_budget=budget), num_tokens)


async def check_resumed(
    generator: EngineGenerator,
    known: dict[str, tuple[Answer, Journal]],
    request: CompletionRequest,
    num_tokens: int,
) -> None:
    """The request has the same output when it is resumed after ``num_tokens``. ``known``: the outputs and
    journals of requests, which are the same for each number of tokens."""
    if repr(request) not in known:
        journal = Journal()
        generator.observe(journal)
        known[repr(request)] = await ask(generator, request), journal
        journal.num_left = None
    whole, journal = known[repr(request)]
    resumed = journal.after(num_tokens)
    if resumed is None:
        return
    end = await generator._client._call(resumed, None)
    assert end.token_ids == [*whole.token_ids]
    assert end.reasoning_tokens == whole.usage.reasoning_tokens


class Journal:
    """Keeps a request as a supervisor does. ``num_left``: None stops that."""

    def __init__(self) -> None:
        self.submit: Submit | None = None
        self.messages: list[FromEngine] = []
        self.num_left: int | None = 0

    def sent(self, submit: Submit) -> None:
        if self.num_left is not None:
            self.submit = submit

    def received(self, messages: list[FromEngine]) -> None:
        if self.num_left is not None:
            self.messages += messages

    def after(self, num_messages: int) -> Submit | None:
        """The request to send again after ``num_messages`` messages; None if it had ended."""
        journal = RequestJournal()
        assert self.submit is not None
        journal.add(self.submit)
        journal.take_ready()
        for message in self.messages[:num_messages]:
            journal.receive(message)
        return journal.resubmit(self.submit.request_id) if len(journal) else None


# Where the answer begins


async def test_f37_a_quoted_end_of_reasoning_ends_nothing() -> None:
    """Written with the tokens of text, not with the token that ends the reasoning."""
    tokenizer, quoted = QWEN_MODEL.tokenizer, "Should I write </think>? No."
    before, after = quoted.split("</think>")
    written = [
        *tokenizer.encode_written(f"<think>\n{before}"),
        *tokenizer.encode("</think>", continues=True),
        *tokenizer.encode_written(f"{after}\n</think>\n\n{ANSWER}"),
        0,
    ]
    num_prompt = 0
    async with generator_of(
        QWEN_MODEL, next_token=lambda tokens: written[len(tokens) - num_prompt]
    ) as generator:
        for fields in ({}, {"constraint": Constraint("regex", r"Hello\. I stop\.")}, {"tools": (LOOK,)}):
            request = asking("Hi", **fields)
            num_prompt = len(await prompt_ids(generator, request))
            answer = await ask(generator, request)
            assert (answer.reasoning, answer.text, answer.finish_reason) == (quoted, ANSWER, "stop")


@EACH
async def test_f32b_a_stop_in_the_white_space_before_an_answer_with_tools_stops_nothing(
    model: ReasoningModel,
) -> None:
    async with generator_of(model) as generator:
        for fields in ({"tools": (LOOK,)}, {"constraint": Constraint("regex", r"Hello\. I stop\.")}):
            if model is SPELLED_MODEL and "constraint" in fields:
                continue  # a constraint begins immediately
            for stop in ("\n", " "):
                answer = await ask(generator, asking(SCRIPT, params={"stop": (stop,)}, **fields))
                assert (answer.reasoning, answer.text) == (REASONING, ANSWER.partition(stop)[0])


@pytest.mark.parametrize("pattern", [r"\n\nHello\. I stop\.", r"\s*Hello\. I stop\.", r" ?Hello\. I stop\."])
async def test_f32c_an_answer_matches_its_regex_with_its_white_space(pattern: str) -> None:
    async with generator_of(QWEN_MODEL) as generator:
        answer = await ask(generator, asking(SCRIPT, constraint=Constraint("regex", pattern)))
        assert (answer.reasoning, answer.finish_reason) == (REASONING, "stop")
        assert re.fullmatch(pattern, answer.text)


@EACH
async def test_f32d_stop_token_ids_apply_to_the_answer_alone(model: ReasoningModel) -> None:
    stop = model.tokenizer.encode(" stop", continues=True)[0]
    async with generator_of(model) as generator:
        answer = await ask(generator, asking(SCRIPT, params={"stop_token_ids": (stop,)}))
        assert answer.reasoning == REASONING
        assert ANSWER.startswith(answer.text)
        assert answer.text != ANSWER


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_f32e_an_end_within_reasoning_ends_the_reasoning_if_the_answer_may_call(mode: str) -> None:
    async with generator_of(QWEN_MODEL) as generator:
        tools = {"tools": (LOOK,), "tool_choice": ToolChoice(mode)}
        answer = await ask(generator, asking("<think>\nI am done.", max_tokens=100, **tools))
        assert answer.reasoning == "I am done."
        assert answer.usage.output_tokens < 100
        assert answer.finish_reason == ("tool_calls" if mode == "required" else "stop")


def ending_early(model: ReasoningModel, answer: str) -> NextToken:
    """A model that ends the generation within its reasoning, and writes ``answer`` after the end of it."""
    begin, end = "<think>\n", "</think>"
    if model is CHANNEL_MODEL:
        begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"

    def next_token(tokens: NDArray[np.int64]) -> int:
        text = model.tokenizer.decode(tokens.tolist(), skip_special=False, continues=True)
        output = text.partition(model.user)[2].partition(model.assistant)[2]
        reasoning, is_over, after = output.partition(end)
        script, written = (answer, after.lstrip("\n")) if is_over else (f"{begin}I am done.", reasoning)
        rest = script.removeprefix(written) if script.startswith(written) else ""
        return model.tokenizer.encode_written(rest)[0] if rest else 0

    return next_token


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("model", [*MODELS.values(), CHANNEL_MODEL], ids=[*MODELS, "channels"])
async def test_f37_an_end_within_reasoning_keeps_the_limit_of_tokens(
    model: ReasoningModel, mode: str
) -> None:
    """For any place of the limit: before the mark that the engine appends, within it or behind it."""
    text, call = "Hello.", CALL
    if model is CHANNEL_MODEL:
        text = "<|channel|>final<|message|>Hello."
        call = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}"
    tools = {"tools": (LOOK,), "tool_choice": ToolChoice(mode)}
    next_token = ending_early(model, text if mode == "auto" else call)
    async with generator_of(model, next_token=next_token) as generator:
        for params, budget in (({"logprobs": True}, None), ({}, 3)):
            fields = {"reasoning_budget": budget, **tools}
            whole = await ask(generator, asking("Hi", params=dict(params), **fields))
            assert whole.finish_reason == ("stop" if mode == "auto" else "tool_calls")
            if model is not SPELLED_MODEL or mode == "auto":  # otherwise the constraint begins immediately
                assert whole.reasoning.startswith("I a")
            limits = range(1, whole.usage.output_tokens + 2)
            answers = await ask_each(
                generator, [asking("Hi", limit, params=dict(params), **fields) for limit in limits]
            )
            for max_tokens, answer in zip(limits, answers, strict=True):
                assert answer.usage.output_tokens <= max_tokens
                assert len(answer.tokens) == (len(answer.token_ids) if params else 0)
                is_whole = max_tokens >= whole.usage.output_tokens
                assert answer.finish_reason == (whole.finish_reason if is_whole else "length"), max_tokens


CALL_WITH_STOP = CALL.replace("{}", '{"what": "I stop."}')
CHANNEL_CALL = '«channel»commentary to=functions.look «constrain»json«message»{"what": "I stop."}'
# A mark of calls that reasoning may show, and a call that contains a stop.
CALLS_OF = {
    "qwen": (QWEN_MODEL, "<tool_call>", CALL_WITH_STOP),
    "deepseek": (DEEPSEEK_MODEL, "<tool_call>", CALL_WITH_STOP.replace("\n", "")),
    "spelled": (SPELLED_MODEL, "<tool_call>", CALL_WITH_STOP),
    "channels": (CHANNEL_MODEL, "to=functions.look", CHANNEL_CALL),
}
WHAT = ToolSpec("look", "Looks.", {"type": "object", "properties": {"what": {"type": "string"}}})


@pytest.mark.parametrize(("model", "shown", "call"), CALLS_OF.values(), ids=CALLS_OF)
async def test_f37_a_call_in_reasoning_turns_off_no_stops_and_one_in_the_answer_does(
    model: ReasoningModel, shown: str, call: str
) -> None:
    stop_ids = tuple(model.tokenizer.encode(" stop", continues=True)[:1])
    stops: list[dict[str, Any]] = [{"stop": ("stop",)}, {"stop_regex": "st.p"}, {"stop_token_ids": stop_ids}]
    scripts: list[tuple[str, str]] = []
    for before in (shown, f"I may write {shown} now.", "No call."):
        if model is CHANNEL_MODEL:
            script = f"«channel»analysis«message»{before}«end»«start»assistant"
            scripts.append((f"{script}«channel»final«message»{ANSWER}", script + call))
        else:
            script = f"<think>\n{before}\n</think>\n\n"
            scripts.append((script + ANSWER, script + call))
    asked = [
        asking(script, tools=(WHAT,), params=dict(params))
        for params, pair in itertools.product(stops, scripts)
        for script in pair
    ]
    async with generator_of(model) as generator:
        answers = await ask_each(generator, asked)
    for request, stopped, called in zip(asked[::2], answers[::2], answers[1::2], strict=True):
        assert ANSWER.startswith(stopped.text), request
        assert stopped.text != ANSWER, request
        assert stopped.finish_reason == "stop", request
        assert [json.loads(one.arguments) for one in called.tool_calls] == [{"what": "I stop."}], request


@given(num_tokens=st.integers(1, 60), before=st.sampled_from(["I may write <tool_call> now.", "No call."]))
def test_f37_a_resumed_request_finds_calls_in_its_answer_alone(
    check_qwen_resumed: CheckResumed, num_tokens: int, before: str
) -> None:
    script = f"<think>\n{before}\n</think>\n\n{CALL_WITH_STOP}\nHello. I stop."
    check_qwen_resumed(asking(script, tools=(WHAT,), params={"stop": ("stop",)}), num_tokens)
