"""Constrained generations in the engine, batched, preempted and resumed, against the reference model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import anyio
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.engine.plain_constrained import PlainConstrained
from support.examples import examples
from support.fake_engine import TOKENIZER, FakeEngine
from support.faults import has_param
from support.logit_runner import alone_by_logits, logit_engine
from support.plain_engine import End
from support.plain_model import PLAIN_IDS, alone, fake_logprob, plain_model_engine
from support.small_tokenizers import byte_level_of

from agentflow.engine.batch import BatchOutput, SampledRows
from agentflow.engine.client import EngineClient
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.dfa import Dfa, build_dfa
from agentflow.engine.grammar.regex import parse_regex
from agentflow.engine.messages import Finished, FromEngine, Progress
from agentflow.engine.models.sampler import choose_tokens
from agentflow.engine.process.request_journal import RequestJournal
from agentflow.engine.request import Submit
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import BadArgument, RequestRefused
from agentflow.kernels.platforms import TORCH
from agentflow.protocol.sampling import SamplingParams

PATTERNS = [
    r'\{"name": "[a-zA-Z ]{1,6}", "quick": (true|false), "answers": \[[0-9](, [0-9]){0,3}\]\}',
    r"(The quick brown (fox|dog) jumps over (the lazy dog|a question)\. ){1,3}",
    r'"[^"\\]{0,12}" is the answer to the question',
    r"[0-9]+",
    r"(yes|no|I do not know)",
    r"\bThe (quick|slow)\b(?: brown\b)?(?: fox\b|\W?)",
    r"The capital of France is Paris, and that of Italy is Rome\.",
]
DFAS: dict[str, Dfa] = {pattern: build_dfa(parse_regex(pattern)) for pattern in PATTERNS}


def constraint(pattern: str) -> CompiledConstraint:
    return CompiledConstraint(pattern, "dfa", DFAS[pattern].to_bytes())


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    pattern: str
    max_tokens: int
    jumps: bool
    logprobs: bool

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, logprobs=self.logprobs)


ASKED = st.builds(
    Asked,
    prompt=st.lists(st.sampled_from(PLAIN_IDS[:3]), min_size=1, max_size=40).map(tuple),
    pattern=st.sampled_from(PATTERNS),
    max_tokens=st.sampled_from([1, 2, 5, 20, 60, 60, 60]),
    jumps=st.sampled_from([True, True, False]),
    logprobs=st.booleans(),
)


@cache
def expected_of(asked: Asked) -> tuple[End, frozenset[int]]:
    """The plain engine's end, and the characters that were forced."""
    text = PlainConstrained(DFAS[asked.pattern], TOKENIZER, asked.jumps)
    end = alone(asked.prompt, asked.params, matcher=text)
    return end, frozenset(text.forced_chars())


def check_end(asked: Asked, end: Finished, streamed: str) -> None:
    expected, forced = expected_of(asked)
    assert (end.text, end.finish_reason) == (expected.text, expected.reason)
    assert {char for first, length in end.forced for char in range(first, first + length)} == forced
    assert end.token_ids == expected.ids
    assert end.finish_reason == "length" or DFAS[asked.pattern].matches(end.text.encode())
    assert end.text.startswith(streamed)
    assert end.logprobs == expected.logprobs


async def ask(client: EngineClient, asked: Asked) -> Finished:
    sent: list[Progress] = []
    end = await client.generate(
        [*asked.prompt],
        asked.params,
        seed=0,
        on_progress=sent.append,
        constraint=constraint(asked.pattern),
        jump_forward=asked.jumps,
    )
    check_end(asked, end, "".join([progress.text for progress in sent]))
    ids: list[int] = []
    logprobs: list[float] = []
    for progress in sent:  # forced tokens get their log-probabilities later
        ids = [*ids[: len(ids) - progress.num_dropped], *progress.token_ids]
        logprobs = [*logprobs[: len(ids) - len(progress.token_ids)], *progress.logprobs]
        before = [[*asked.prompt, *ids[:index]] for index in range(len(logprobs))]
        assert logprobs == [*map(fake_logprob, before, ids)]
    assert asked.logprobs or not logprobs
    return end


@examples(140)
@given(
    st.sampled_from([256, 8]),
    st.lists(ASKED, min_size=1, max_size=10),
    st.sampled_from([4096, 150]),
    st.booleans(),
)
def test_constrained_requests_in_any_batch_give_what_each_gives_alone(
    budget: int, asked: Sequence[Asked], slots: int, ahead: bool
) -> None:
    async def main() -> None:
        config = SchedulerConfig(token_budget=budget, max_running=6)
        async with (
            plain_model_engine(config, num_slots=slots, max_context=150, launches_ahead=ahead) as client,
            anyio.create_task_group() as group,
        ):
            for one in asked:
                group.start_soon(ask, client, one)

    anyio.run(main)


@given(
    prompt=st.lists(st.sampled_from(PLAIN_IDS[:3]), min_size=1, max_size=10),
    pattern=st.sampled_from(PATTERNS),
    params=st.builds(
        SamplingParams,
        max_tokens=st.just(60),
        frequency_penalty=st.sampled_from([0.0, 0.7, 2.0]),
        presence_penalty=st.sampled_from([0.0, 1.5]),
        repetition_penalty=st.sampled_from([1.0, 1.5]),
    ),
)
def test_penalties_count_the_ids_that_jump_forward_left(prompt, pattern, params) -> None:
    """Forced text is encoded together with tokens that were sampled and penalized before."""

    async def main() -> None:
        async with logit_engine() as client:
            end = await client.generate(
                prompt, params, seed=0, on_text=lambda text: None, constraint=constraint(pattern)
            )
        expected = alone_by_logits(prompt, params, matcher=PlainConstrained(DFAS[pattern], TOKENIZER))
        assert (end.text, end.finish_reason) == (expected.text, expected.reason)
        assert end.token_ids == expected.ids

    anyio.run(main)


@given(ASKED, st.integers(0, 40))
def test_a_resubmitted_request_continues_as_the_first_engine_would_have(
    asked: Asked, num_received: int
) -> None:
    """A journal receives a first engine's messages up to a point; a second engine gets its resubmission."""
    submit: list[Submit] = []
    messages: list[FromEngine] = []

    class Observer:
        def sent(self, message: Submit) -> None:
            submit.append(message)

        def received(self, received: Sequence[FromEngine]) -> None:
            messages.extend(received)

    async def main() -> None:
        received: list[str] = []
        async with plain_model_engine() as first:
            first.observe(Observer())
            await ask(first, asked)
        journal = RequestJournal()
        journal.add(submit[0])
        journal.take_ready()
        for message in messages[:num_received]:
            if not isinstance(message, Finished):
                journal.receive(message)
            if isinstance(message, Progress):
                received.append(message.text)
        journal.process_died()
        (again,) = journal.take_ready()
        async with plain_model_engine() as second:
            end = await second._call(
                msgspec.structs.replace(again, request_id=999), lambda sent: received.append(sent.text)
            )
        check_end(asked, end, "".join(received))

    anyio.run(main)


TO_HOLD = Tokenizer(byte_level_of(["the", " answer", " a", " question", "ab", "abc", "xc", "xcd"]))


class EqualRunner(FakeRunner):
    """A model to which all tokens are equally likely, with the real sampler."""

    def choose(self, seen: list[NDArray[np.int64]], sampled: SampledRows) -> BatchOutput:
        if not seen:
            return BatchOutput(sampled.target_ids.copy(), None)
        return choose_tokens(torch.zeros(len(seen), self.info.vocab_size), sampled, TORCH.sampler)


async def draws(pattern: str, seeds: range) -> list[tuple[Finished, str]]:
    """Outputs under a pattern, each with the texts that were streamed."""
    engine = FakeEngine(runner=EqualRunner(vocab_size=TO_HOLD.vocab_size), tokenizer=TO_HOLD)
    compiled = CompiledConstraint(pattern, "dfa", build_dfa(parse_regex(pattern)).to_bytes())
    found: list[tuple[Finished, str]] = []
    async with engine.open_client() as client:
        for seed in seeds:
            texts: list[str] = []
            params = SamplingParams(max_tokens=60, temperature=1.0)
            end = await client.generate([5], params, seed=seed, on_text=texts.append, constraint=compiled)
            found.append((end, "".join(texts)))
    return found


@pytest.mark.anyio
async def test_f2a_what_is_drawn_again_after_forced_text_has_another_random_number() -> None:
    """After "x" the forced "c" makes "xc", which might become "xcd": one draw in two takes that, and half of
    the others continue with "d"."""
    ends = [end.text for end, _ in await draws("(ab|x)c[de]", range(600))]
    of_x = [text for text in ends if text.startswith("x")]
    num_d = sum(text == "xcd" for text in of_x)
    expected, deviation = 0.75 * len(of_x), math.sqrt(len(of_x) * 0.75 * 0.25)
    assert len(of_x) > 300
    assert abs(num_d - expected) < 4 * deviation


@pytest.mark.anyio
async def test_f3a_no_text_is_sent_again_after_a_restart() -> None:
    """Of "the a", which was sent, "the" is left when " a" is held back and the engine dies."""
    for end, streamed in await draws("the (answer|question)( is)?", range(20)):
        assert end.text.startswith(streamed)
    submit = Submit(7, [5], SamplingParams(max_tokens=60), constraint=None)
    pattern = "the (answer|question)"
    compiled = CompiledConstraint(pattern, "dfa", build_dfa(parse_regex(pattern)).to_bytes())
    journal = RequestJournal()
    journal.add(msgspec.structs.replace(submit, constraint=compiled))
    journal.take_ready()
    the, a = TO_HOLD.encode("the", continues=True), TO_HOLD.encode(" a", continues=True)
    journal.receive(Progress(7, "the a", [*the, *a], ()))
    journal.receive(Progress(7, "", (), (), num_dropped=len(a)))
    journal.process_died()
    (again,) = journal.take_ready()
    texts = ["the a"]
    engine = FakeEngine(runner=EqualRunner(vocab_size=TO_HOLD.vocab_size), tokenizer=TO_HOLD)
    async with engine.open_client() as client:
        end = await client._call(again, lambda sent: texts.append(sent.text))
    assert "".join(texts) + end.text[len("".join(texts)) :] == end.text
    assert len("".join(texts)) <= len(end.text)


@pytest.mark.anyio
async def test_f3b_the_log_probabilities_of_long_forced_text_are_reported_as_they_come() -> None:
    pattern = "The quick brown fox jumps over the lazy dog, " * 40 + "[ab]"
    received: list[float] = []
    params = SamplingParams(max_tokens=2000, logprobs=True)
    compiled = CompiledConstraint(pattern, "dfa", build_dfa(parse_regex(pattern)).to_bytes())
    config = SchedulerConfig(token_budget=64)
    async with plain_model_engine(config) as client:
        end = await client.generate(
            [5], params, seed=0, on_progress=lambda sent: received.extend(sent.logprobs), constraint=compiled
        )
    assert received == end.logprobs


@pytest.mark.anyio
@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("jumps", [True, False])
async def test_f10a_a_stop_string_inside_forced_text_ends_the_text(jumps: bool, logprobs: bool) -> None:
    """Forced tokens behind it are not counted."""
    sent: list[Progress] = []
    async with plain_model_engine() as client:
        end = await client.generate(
            [5, 6],
            SamplingParams(max_tokens=60, stop=("France",), logprobs=logprobs),
            seed=0,
            on_progress=sent.append,
            constraint=constraint(PATTERNS[-1]),
            jump_forward=jumps,
        )
        stats = await client.stats()
    received = [token for progress in sent for token in progress.token_ids]
    assert end.text == "The capital of "
    assert "".join([progress.text for progress in sent]) == "The capital of "
    assert end.finish_reason == "stop"
    assert len(end.logprobs) == (len(end.token_ids) if logprobs else 0)
    assert end.forced == ([(0, len(end.text))] if jumps else [])
    assert "France" in TOKENIZER.decode(received)
    assert "France" not in TOKENIZER.decode(received[:-1])
    assert end.output_tokens == stats.generated_tokens == len(received)
    assert end.forced_tokens == stats.forced_tokens == (len(received) if jumps else 0)


@pytest.mark.anyio
async def test_f10a_a_request_that_was_stopped_in_forced_text_resumes_at_its_stop() -> None:
    """An engine may die before the forced tokens are scored."""
    params = SamplingParams(max_tokens=60, stop=("France",), logprobs=True)
    sent: list[Progress] = []
    asked = {"seed": 0, "constraint": constraint(PATTERNS[-1])}
    async with plain_model_engine() as client:
        end = await client.generate([5, 6], params, on_progress=sent.append, **asked)
        journal = RequestJournal()
        journal.add(Submit(100, [5, 6], params, **asked))
        journal.take_ready()
        journal.receive(msgspec.structs.replace(sent[0], request_id=100))
        journal.process_died()
        [again] = journal.take_ready()
        resumed = await client._call(again, None)
    assert (resumed.text, resumed.token_ids) == (end.text, end.token_ids)
    assert resumed.output_tokens == end.output_tokens
    assert resumed.logprobs == end.logprobs


@pytest.mark.anyio
async def test_forced_text_takes_few_steps_and_is_counted() -> None:
    async with plain_model_engine() as client:
        steps: list[int] = []
        for jumps in (True, False):
            before = (await client.stats()).steps
            await ask(client, Asked((5, 6), PATTERNS[-1], 60, jumps, logprobs=False))
            steps.append((await client.stats()).steps - before)
        stats = await client.stats()
    assert steps[0] == 0  # all of it is forced: nothing had to be computed
    assert steps[1] > 10
    assert stats.forced_tokens > 10
    assert stats.generated_tokens == stats.forced_tokens + steps[1]


@pytest.mark.anyio
@pytest.mark.parametrize("pattern", PATTERNS)
async def test_f37_the_engine_counts_the_forced_tokens_that_replies_count(pattern: str) -> None:
    """A jump may encode sampled text again together with the forced text."""
    async with plain_model_engine() as client:
        asked = [Asked((5, token), pattern, 60, True, logprobs=False) for token in PLAIN_IDS[:4]]
        ends = [await ask(client, one) for one in asked]
        stats = await client.stats()
    assert stats.forced_tokens == sum([end.forced_tokens for end in ends])


@pytest.mark.anyio
async def test_a_constraint_that_the_models_tokens_cannot_satisfy_is_rejected() -> None:
    vocab_size = 60
    char = next(c for c in map(chr, range(33, 127)) if TOKENIZER.encode(c)[0] >= vocab_size)
    unwritable = build_dfa(parse_regex(f"[{char}]+"))
    async with plain_model_engine(vocab_size=vocab_size, next_token=lambda tokens: 5) as client:
        with pytest.raises(RequestRefused, check=has_param("constraint")):
            await client.generate(
                [5, 6],
                SamplingParams(max_tokens=4),
                seed=0,
                on_text=lambda text: None,
                constraint=CompiledConstraint("unwritable", "dfa", unwritable.to_bytes()),
            )


@pytest.mark.anyio
async def test_f10b_a_request_whose_every_token_is_excluded_fails_with_one_error_and_alone() -> None:
    """The token that the grammar requires is one that ends the text, before it may end."""
    compiled = CompiledConstraint("zz", "dfa", build_dfa(parse_regex("zz|zzz")).to_bytes())
    stop_ids = tuple(i for i in range(TOKENIZER.vocab_size) if TOKENIZER.decode([i]).startswith("z"))
    received: list[int] = []
    async with logit_engine() as client:
        for temperature in (0.0, 1.0):
            params = SamplingParams(
                max_tokens=9,
                min_tokens=5,
                temperature=temperature,
                stop_token_ids=stop_ids,
                logit_bias=((stop_ids[0], 100.0), (0, 100.0)),
            )
            with pytest.raises(BadArgument, check=has_param("min_tokens")):
                await client.generate(
                    [5, 6],
                    params,
                    seed=0,
                    on_progress=lambda sent: received.extend(sent.token_ids),
                    constraint=compiled,
                    jump_forward=False,
                )
        assert not received
        end = await client.generate([5, 6], SamplingParams(max_tokens=4), seed=0)
        assert end.output_tokens


@pytest.mark.anyio
@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 3}], ids=str)
async def test_f10b_a_complete_text_that_no_token_can_continue_is_over(params: dict) -> None:
    """Also where no end token is allowed."""
    vocab_size = 60
    chars = [chr(n) for n in range(33, 127) if chr(n).isalnum()]
    writable = next(c for c in chars if TOKENIZER.encode(c)[0] < vocab_size)
    other = next(c for c in chars if TOKENIZER.encode(c)[0] >= vocab_size)
    dfa = build_dfa(parse_regex(f"{writable}({other}+)?"))
    async with plain_model_engine(vocab_size=vocab_size, next_token=lambda tokens: 5) as client:
        end = await client.generate(
            [5, 6],
            SamplingParams(max_tokens=4, **params),
            seed=0,
            on_text=lambda text: None,
            constraint=CompiledConstraint("half writable", "dfa", dfa.to_bytes()),
            jump_forward=False,
        )
    assert (end.text, end.finish_reason) == (writable, "stop")
