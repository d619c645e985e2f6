"""Completions, as deltas and as answers, against direct requests to the engine."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import TEMPLATE, TOKENIZER, FakeEngine
from support.faults import has_param
from support.holds import until

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.generator.requests import MAX_INLINE_CHARS
from agentflow.engine.grammar.compiler.compiler import constraint_compiler
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.errors import BadArgument, NotSupported, PromptTooLong
from agentflow.protocol.chat import Message
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import GenParams, SamplingParams
from agentflow.server.completion.completion import completing
from agentflow.server.completion.request import (
    AnswerEnded,
    AnswerToken,
    CompletionRequest,
    TextDelta,
    TokenIds,
    ToolArguments,
    ToolCallBegun,
    join_answers,
    merge_deltas,
)

pytestmark = pytest.mark.anyio

ASK = (Message("system", "Be brief."), Message("user", "What do plants do?"))
SAMPLED_GEN = GenParams(max_tokens=24, temperature=1.0, seed=3)
SAMPLED = SAMPLED_GEN.resolved()


@asynccontextmanager
async def generator_on(engine: FakeEngine) -> AsyncIterator[EngineGenerator]:
    async with engine.open_client() as client:
        yield EngineGenerator(client, TEMPLATE)
        await engine.assert_idle()


async def ask(generator: EngineGenerator, request: CompletionRequest):
    async with completing(generator, request) as completion:
        return await completion.answers()


class SentPrompts(list[list[int]]):
    """The prompts of the requests that the engine is sent."""

    def sent(self, submit) -> None:
        self.append([*submit.token_ids])

    def received(self, messages) -> None:
        pass


def sent_prompts(generator: EngineGenerator) -> SentPrompts:
    prompts = SentPrompts()
    generator.observe(prompts)
    return prompts


async def test_a_conversation_is_what_a_state_with_these_turns_is():
    engine = FakeEngine()
    async with generator_on(engine) as generator:
        [answer] = await ask(generator, CompletionRequest(ASK, SAMPLED))
        context = generator.open("")
        for message in ASK:
            generator.begin_role(context, message.role)
            generator.fill(context, message.content)
            generator.end_role(context)
        generator.begin_role(context, "assistant")
        end = await generator.generate(context, SAMPLED_GEN, lambda text: None)
        generator.free(context)
    assert answer.text == end.text
    assert answer.finish_reason == "length"
    assert answer.usage.prompt_tokens == end.usage.prompt_tokens
    assert answer.usage.output_tokens == 24


async def test_an_answer_that_comes_back_as_text_is_the_tokens_that_were_generated():
    engine = FakeEngine()
    async with generator_on(engine) as generator:
        prompts = sent_prompts(generator)
        [answer] = await ask(generator, CompletionRequest(ASK, SAMPLED))
        again = (*ASK, Message("assistant", answer.text), Message("user", "And at night?"))
        [next_answer] = await ask(generator, CompletionRequest(again, SAMPLED))
        context = generator.open("")
        for message in again[:2]:
            context.tokens.turn(message)
        context.tokens.begin_role("assistant")
        start = context.tokens.ids()
        # Another conversation with the same answer in it does not know it.
        other = (Message("user", "Something else."), *again[2:])
        await ask(generator, CompletionRequest(other, SAMPLED))
        # Nor does the same one under another salt: a hit would reveal that another tenant had sent it.
        await ask(generator, CompletionRequest(again, SAMPLED, cache_salt="other"))
    assert prompts[1][: len(start)] == start == prompts[0]
    # All that was computed of the first turn and its answer is cached: but its last token, never computed.
    assert next_answer.usage.cached_tokens == len(start) + 24 - 1
    encoded = TOKENIZER.encode(answer.text, continues=True)
    assert encoded != prompts[1][len(start) : len(start) + 24]  # a fresh encoding differs
    for prompt in prompts[2:]:
        assert any(prompt[at : at + len(encoded)] == encoded for at in range(len(prompt)))
    assert len(prompts) == 4


async def test_a_last_turn_of_the_assistant_goes_on():
    engine = FakeEngine()
    async with generator_on(engine) as generator:
        prompts = sent_prompts(generator)
        await ask(generator, CompletionRequest((*ASK, Message("assistant", "They turn")), SAMPLED))
        await ask(generator, CompletionRequest(ASK, SAMPLED))
    assert prompts[0][: len(prompts[1])] == prompts[1]
    assert TOKENIZER.decode(prompts[0][len(prompts[1]) :], continues=True) == "They turn"


@pytest.mark.parametrize("num_chars", [30, MAX_INLINE_CHARS + 1])
async def test_in_a_plain_text_special_tokens_count(num_chars):
    text = "<|im_start|>user\n" + "x" * num_chars
    runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, num_slots=8192, max_context=8192)
    async with generator_on(FakeEngine(runner=runner)) as generator:
        prompts = sent_prompts(generator)
        await ask(generator, CompletionRequest(text, SAMPLED))
    assert prompts == [TOKENIZER.encode_markup(text)]


async def test_a_prompt_far_too_long_is_refused_before_it_is_encoded(monkeypatch):
    engine = FakeEngine()
    async with generator_on(engine) as generator:
        for prompt in ("x" * 100_000, (Message("user", "x" * 50_000), Message("assistant", "y" * 50_000))):
            with monkeypatch.context() as patch:
                patch.setattr(generator.tokenizer, "_encode", None)  # nothing may be encoded
                with pytest.raises(PromptTooLong, match="100,000"):
                    await ask(generator, CompletionRequest(prompt, SAMPLED))
        with pytest.raises(PromptTooLong, match=r"\b10\b"):
            await ask(generator, CompletionRequest("x" * 1000, SAMPLED, max_prompt_tokens=10))


async def test_ids_are_the_prompt_as_they_are():
    engine = FakeEngine()
    async with generator_on(engine) as generator:
        prompts = sent_prompts(generator)
        await ask(generator, CompletionRequest(TokenIds((5, 6, 7)), SAMPLED, n=2))
        for wrong in (-1, TOKENIZER.vocab_size):
            with pytest.raises(BadArgument, check=has_param("prompt")):
                await ask(generator, CompletionRequest(TokenIds((5, wrong)), SAMPLED))
    assert prompts == [[5, 6, 7], [5, 6, 7]]


async def test_several_answers_are_a_fork_of_one_prompt():
    engine = FakeEngine()
    async with generator_on(engine) as generator:
        request = CompletionRequest(ASK, SAMPLED, n=3)
        answers = await ask(generator, request)
        stats = await generator.stats()
        again = await ask(generator, request)
        [alone] = await ask(generator, CompletionRequest(ASK, SAMPLED))
    num_prompt = answers[0].usage.prompt_tokens
    assert [answer.text for answer in answers] == [answer.text for answer in again]
    assert answers[0].text == alone.text
    # The prompt is computed once, and the request that computed it does not count it as cached.
    assert stats.computed_tokens < 2 * num_prompt + 3 * 24
    assert min(answer.usage.cached_tokens for answer in answers) < num_prompt // 2
    assert max(answer.usage.cached_tokens for answer in answers) >= num_prompt - 1


async def test_log_probabilities_come_with_the_text_that_they_are_of():
    engine = FakeEngine()
    params = SamplingParams(max_tokens=40, logprobs=True, top_logprobs=2, seed=1, temperature=1.0)
    async with generator_on(engine) as generator:
        async with completing(generator, CompletionRequest(ASK, params)) as completion:
            deltas = []
            while batch := await completion.next():
                deltas += batch
        [answer] = join_answers(deltas, 1)
    assert len(answer.tokens) == 40
    assert b"".join(token.raw for token in answer.tokens).decode(errors="replace").startswith(answer.text)
    assert all(len(token.top) == 2 and token.logprob is not None for token in answer.tokens)
    reported = b""
    text = ""
    for delta in deltas:
        if isinstance(delta, TextDelta):
            reported += b"".join(token.raw for token in delta.tokens)
            text += delta.text
            if delta is not deltas[-2]:  # the last one also has the bytes that are no text
                assert text.startswith(codecs.getincrementaldecoder("utf-8")("replace").decode(reported))


async def test_a_token_that_is_reported_again_has_its_text(monkeypatch):
    """The text of each token is decoded once, for any number of reports and answers."""
    decoded: Counter[int] = Counter()
    decode = TOKENIZER.decode

    def counted(ids, **how):
        decoded.update(ids if how.get("skip_special") is False else ())
        return decode(ids, **how)

    monkeypatch.setattr(TOKENIZER, "decode", counted)
    monkeypatch.setattr(TOKENIZER, "_shown", {})
    params = SamplingParams(max_tokens=40, logprobs=True, top_logprobs=3, seed=1, temperature=1.0)
    async with generator_on(FakeEngine()) as generator:
        answers = await ask(generator, CompletionRequest(ASK, params, n=3))
    reported = [one for answer in answers for token in answer.tokens for one in (token, *token.top)]
    assert len(reported) > 100
    assert all(
        (one.text, one.raw)
        == (decode([one.token_id], skip_special=False, continues=True), TOKENIZER.token_bytes(one.token_id))
        for one in reported
    )
    assert set(decoded) == {one.token_id for one in reported}
    assert set(decoded.values()) == {1}
    assert set(TOKENIZER._shown) == set(decoded)


async def test_under_a_constraint_tokens_are_reported_at_the_end():
    engine = FakeEngine()
    params = SamplingParams(max_tokens=200, logprobs=True, seed=1)
    request = CompletionRequest(ASK, params, constraint=Constraint("regex", "(yes|no), I mean [0-9]{3}"))
    async with engine.open_client() as client, constraint_compiler() as compiler:
        generator = EngineGenerator(client, TEMPLATE, compiler=compiler)
        [answer] = await ask(generator, request)
    assert b"".join(token.raw for token in answer.tokens).decode() == answer.text
    assert answer.text.endswith(tuple("0123456789"))


async def test_leaving_the_block_aborts_what_runs():
    engine = FakeEngine()
    async with generator_on(engine) as generator:
        request = CompletionRequest(ASK, SamplingParams(max_tokens=900), n=3)
        async with completing(generator, request) as completion:
            await completion.next()
        stats = await generator.stats()
    assert (stats.running, stats.waiting, stats.in_use_slots) == (0, 0, 0)


async def test_errors_are_raised_where_the_deltas_are_fetched():
    engine = FakeEngine()
    async with generator_on(engine) as generator:
        too_long = CompletionRequest("x" * 3000, SAMPLED)
        async with completing(generator, too_long) as completion:
            with pytest.raises(PromptTooLong):
                await completion.until_accepted()
            with pytest.raises(PromptTooLong):
                await completion.next()
        with pytest.raises(NotSupported):
            await ask(generator, CompletionRequest(ASK, SAMPLED, constraint=Constraint("regex", "a")))


async def test_a_slow_reader_gets_larger_deltas():
    engine = FakeEngine()
    request = CompletionRequest(ASK, SAMPLED, n=2)
    async with generator_on(engine) as generator, completing(generator, request) as completion:
        with anyio.fail_after(10):
            await until(lambda: completion._has_ended)
        deltas = await completion.next()
        assert await completion.next() == []
    assert [type(delta) for delta in deltas].count(TextDelta) == 2
    assert [type(delta) for delta in deltas].count(AnswerEnded) == 2


ANSWER = st.lists(
    st.one_of(
        st.text(min_size=1, max_size=3),
        st.lists(st.text(min_size=1, max_size=3), max_size=3).map(tuple),
    ),
    max_size=5,
)


@given(st.lists(ANSWER, min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=40))
async def test_deltas_put_together_are_the_same_answers(answers, order):
    """Text, and calls with their arguments, of several answers mixed up."""
    lines = []
    for index, parts in enumerate(answers):
        line = []
        calls = 0
        for part in parts:
            if isinstance(part, str):
                line.append(TextDelta(index, part))
            else:
                line.append(ToolCallBegun(index, calls, f"call_{calls}", "tool"))
                line += [ToolArguments(index, calls, text) for text in part]
                calls += 1
        lines.append([*line, AnswerEnded(index, "stop", Usage())])
    mixed = []
    while any(lines):
        left = [line for line in lines if line]
        turn = order[len(mixed)] if len(mixed) < len(order) else 0
        mixed.append(left[turn % len(left)].pop(0))
    joined = merge_deltas(mixed)
    assert join_answers(joined, len(answers)) == join_answers(mixed, len(answers))
    assert len(joined) <= len(mixed)


async def test_deltas_are_put_together_once():
    """Each delta is copied a few times, and not once for each delta after it."""
    token = AnswerToken(1, "a", b"a", -0.5)
    num_answers, num_deltas = 5_000, 5
    deltas = [TextDelta(index, "a", (token,)) for index in range(num_answers) for _ in range(num_deltas)]
    deltas += [AnswerEnded(index, "stop", Usage()) for index in range(num_answers)]
    answers = join_answers(deltas, num_answers)
    assert {(answer.text, len(answer.tokens)) for answer in answers} == {("a" * num_deltas, num_deltas)}
    [joined] = merge_deltas([TextDelta(0, "a" * 50, (token,))] * 50_000)
    assert (len(joined.text), len(joined.tokens)) == (2_500_000, 50_000)
    [joined] = merge_deltas([ToolArguments(0, 2, "a" * 50)] * 50_000)
    assert (joined.call, len(joined.text)) == (2, 2_500_000)
