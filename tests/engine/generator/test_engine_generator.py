"""States in the engine: token-exact from turn to turn, shared between forks, apart between tenants."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import TEMPLATE, TOKENIZER, FakeEngine, StepGate
from support.faults import has_param
from support.plain_engine import End, PlainEngine, num_common
from support.plain_model import END_ID, PLAIN_MODEL, alone, plain_model_engine, plain_token

import agentflow as af
from agentflow.engine.client import EngineClient
from agentflow.engine.generator.context import PIECE_CHARS, EngineContext, PromptLimits
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.generator.requests import MAX_INLINE_CHARS
from agentflow.engine.messages import UpdateHint
from agentflow.engine.request import GREEDY, Submit
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.tenant import Tenant
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.state import token_state
from agentflow.protocol.events import Capabilities, Stats
from agentflow.protocol.sampling import GenParams, SamplingParams
from agentflow.runtime.generator import StateHint
from agentflow.runtime.programs.scheduling_hint import SchedulingHint

pytestmark = pytest.mark.anyio

SPECIAL_IDS = {TOKENIZER.encode_markup(text)[0] for text in ("<|im_start|>", "<|im_end|>")}
CHOICES = ("yes, an", "no, an", "the question an")


def generator_on(client: EngineClient, tenant: str = "") -> EngineGenerator:
    return EngineGenerator(client, TEMPLATE, tenant=Tenant(tenant, sees_metrics=True))


def prompt_of(context: EngineContext) -> list[int]:
    """The ids that a gen would now be given."""
    context.tokens.cut()
    return context.tokens.ids()


def fill_turn(generator: EngineGenerator, context: EngineContext, role: str, text: str) -> None:
    generator.begin_role(context, role)
    generator.fill(context, text)
    generator.end_role(context)


async def generate(generator: EngineGenerator, context: EngineContext, **params) -> tuple:
    deltas: list[str] = []
    end = await generator.generate(context, GenParams(**params), deltas.append)
    assert end.text.startswith("".join(deltas))
    return end


@dataclass
class Conversations:
    """Contexts of one generator, and the plain engine, which is asked the same."""

    generator: EngineGenerator
    contexts: list[EngineContext] = field(default_factory=list)
    plain: PlainEngine = field(
        default_factory=lambda: PlainEngine(PLAIN_MODEL, TOKENIZER, num_slots=10**6, max_context=2048)
    )

    def open(self, cache_salt: str) -> None:
        # Without a turn before the assistant's, the template would later put a system turn there.
        self.contexts.append(self.generator.open(cache_salt))
        fill_turn(self.generator, self.contexts[-1], "user", "Hello.")

    def expected(
        self, context: EngineContext, prompt: list[int], params: SamplingParams = GREEDY, **options
    ) -> tuple[End, int]:
        """The plain engine's end of a request, and how many of its tokens were cached."""
        request = self.plain.submit(prompt, params, owner=str(context.origin.cache_salt), **options)
        self.plain.run()
        assert request.end is not None
        assert request.num_cached is not None
        return request.end, request.num_cached

    async def ask(self, context: EngineContext, text: str, params: SamplingParams) -> None:
        """An assistant's turn with a text and a gen, against the reference."""
        self.generator.begin_role(context, "assistant")
        self.generator.fill(context, text)
        prompt = prompt_of(context)
        expected, num_cached = self.expected(context, prompt, params)
        end = await generate(
            self.generator, context, max_tokens=params.max_tokens, stop=params.stop, logprobs=params.logprobs
        )
        assert (end.text, end.finish_reason) == (expected.text, expected.reason)
        assert context.tokens.ids() == prompt + expected.ids
        assert end.usage == af.Usage(len(prompt), num_cached, expected.num_sampled)
        assert (end.logprobs is None) == (not params.logprobs)
        assert (end.tokens is None) == (not params.logprobs)  # f25b
        if end.logprobs is not None and end.tokens is not None:
            assert len(end.tokens) == len(end.logprobs)
            assert "\N{REPLACEMENT CHARACTER}" in end.text or "".join(end.tokens) == end.text
        self.generator.end_role(context)
        assert prompt_of(context)[: len(prompt) + len(expected.ids)] == prompt + expected.ids
        assert context.tokens.num_rerendered_tokens == 0

    async def choose(self, context: EngineContext, text: str) -> None:
        """An assistant's turn with a text and a select, against the reference."""
        self.generator.begin_role(context, "assistant")
        settled = prompt_of(context)
        self.generator.fill(context, text)
        encoded = [settled + TOKENIZER.encode(text + choice, continues=True) for choice in CHOICES]
        start = min(len(encoded[0]), *(num_common(encoded[0], ids) for ids in encoded[1:]))
        start = min(start, *(len(ids) - 1 for ids in encoded))
        prefix = encoded[0][:start]
        expected, num_cached = self.expected(context, prefix, choices=[ids[start:] for ids in encoded])
        scores = [sum(logprobs) / len(logprobs) for logprobs in expected.choice_logprobs]
        end = await self.generator.score(context, CHOICES, "token_length_normalized")
        assert end.scores == pytest.approx(scores)
        assert end.index == max(range(len(CHOICES)), key=scores.__getitem__)
        self.generator.fill(context, "swer")  # is not encoded together with the chosen text
        assert prompt_of(context) == encoded[end.index] + TOKENIZER.encode("swer", continues=True)
        assert context.tokens.text_view().endswith(text + CHOICES[end.index] + "swer")
        assert end.usage == af.Usage(len(prefix), num_cached, 0)
        self.generator.end_role(context)
        assert prompt_of(context)[: len(encoded[end.index])] == encoded[end.index]
        assert context.tokens.num_rerendered_tokens == 0


texts = st.text(st.sampled_from("the an<|im_start|>\n日"), max_size=10) | st.just(
    "<|im_end|>\n<|im_start|>user\n"
)
steps = st.one_of(
    st.tuples(st.just("open"), st.sampled_from(["", "", "salt"])),
    st.tuples(st.just("say"), texts),
    st.tuples(
        st.just("ask"), texts, st.integers(1, 12), st.sampled_from([(), ("e",), ("an", " t")]), st.booleans()
    ),
    st.tuples(st.just("choose"), texts),
    st.tuples(st.just("fork"), st.integers(1, 3)),
)


@pytest.mark.on_trio
@pytest.mark.trio_in_full
@given(plan=st.lists(st.tuples(st.integers(0, 5), steps), min_size=4, max_size=12))
async def test_conversations_are_token_exact_and_reuse_all_that_was_computed(plan):
    async with plain_model_engine(
        SchedulerConfig(token_budget=32), max_context=2048, num_slots=16384
    ) as client:
        talk = Conversations(generator_on(client))
        for which, (kind, *args) in plan:
            if kind == "open" or not talk.contexts:
                talk.open(args[0] if kind == "open" else "")
                continue
            context = talk.contexts[which % len(talk.contexts)]
            match kind:
                case "say":
                    fill_turn(talk.generator, context, "user", args[0])
                case "ask":
                    text, max_tokens, stop, logprobs = args
                    await talk.ask(
                        context, text, SamplingParams(max_tokens=max_tokens, stop=stop, logprobs=logprobs)
                    )
                case "choose":
                    await talk.choose(context, args[0])
                case "fork":
                    ahead = context.prefill_ahead
                    talk.contexts += await talk.generator.fork(context, args[0])
                    if context.prefill_ahead != ahead:
                        talk.expected(context, prompt_of(context), choices=[[]])  # only computed
        for context in talk.contexts:
            talk.generator.free(context)
        await talk.generator.stats()  # by now the engine has read that
        # No content is markup of a turn, which comes from roles alone.
        for context in talk.contexts:
            ids = prompt_of(context)
            starts = ids.count(TOKENIZER.encode_markup("<|im_start|>")[0])
            roles = [message["role"] for message in context.tokens.messages()]
            assert starts == len(roles) + (roles[:1] != [] and roles[0] != "system")


async def test_the_next_turn_begins_with_exactly_what_was_generated():
    """Also where the tokenizer would encode the text differently."""

    def spelled(tokens) -> int:  # one character at a time, always
        return TOKENIZER.encode("answer"[len(tokens) % 6])[0]

    async with plain_model_engine(next_token=spelled) as client:
        generator = generator_on(client)
        context = generator.open("")
        fill_turn(generator, context, "user", "Spell it.")
        generator.begin_role(context, "assistant")
        prompt = prompt_of(context)
        end = await generate(generator, context, max_tokens=6)
        generated = context.tokens.ids()[len(prompt) :]
        assert len(generated) == 6 > len(TOKENIZER.encode(end.text))
        generator.end_role(context)
        fill_turn(generator, context, "user", "Again.")
        generator.begin_role(context, "assistant")
        again = await generate(generator, context, max_tokens=6)
        # All but the last token of the first answer, which was never fed to the model.
        assert again.usage.cached_tokens == len(prompt) + 5
        assert prompt_of(context)[: len(prompt) + 6] == prompt + generated


@pytest.mark.parametrize("end", ["the mark of the turn", "the end of texts", "a stop", "the length"])
async def test_a_turn_ends_once_whatever_ended_its_gen(end: str):
    """A model may write the mark itself, which the role's end writes in any case."""
    mark = TOKENIZER.encode_markup("<|im_end|>")[0]
    last = {"the mark of the turn": mark, "the end of texts": END_ID}.get(end, TOKENIZER.encode("!")[0])
    written = [*TOKENIZER.encode("the answer", continues=True), last]
    prompt: list[int] = []
    params: dict[str, Any] = {"stop": ("!",)} if end == "a stop" else {}
    if end == "the length":
        params["max_tokens"] = len(written) - 1
    options = {"end_token_ids": (END_ID, mark), "next_token": lambda ids: written[len(ids) - len(prompt)]}
    async with plain_model_engine(**options) as client:
        generator = generator_on(client)
        context = generator.open("")
        fill_turn(generator, context, "user", "Say it.")
        generator.begin_role(context, "assistant")
        prompt += prompt_of(context)
        generated = await generate(generator, context, **params)
        assert generated.text == "the answer"
        assert generated.finish_reason == {"a stop": "stop", "the length": "length"}.get(end, "eos")
        generator.end_role(context)
        assert prompt_of(context) == prompt + written[:-1] + TOKENIZER.encode_markup("<|im_end|>\n")


async def test_f37_an_empty_text_with_log_probabilities_has_an_empty_list_of_tokens():
    async with plain_model_engine(next_token=lambda ids: END_ID) as client:
        generator = generator_on(client)
        context = generator.open("")
        generator.fill(context, "some words")
        end = await generate(generator, context, logprobs=True)
        assert (end.text, end.logprobs, end.tokens) == ("", (), ())


@pytest.mark.on_trio
async def test_forks_compute_what_they_share_once():
    async with plain_model_engine(SchedulerConfig(token_budget=16)) as client:
        generator = generator_on(client)
        context = generator.open("")
        fill_turn(generator, context, "user", "the answer to the question is " * 10)
        before = len(prompt_of(context))
        branches = await generator.fork(context, 5)
        ends = {}

        async def run(number: int) -> None:
            fill_turn(generator, branches[number], "user", str(number))
            generator.begin_role(branches[number], "assistant")
            ends[number] = await generate(generator, branches[number], max_tokens=2, ignore_eos=True)

        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(run, number)
        stats = await generator.stats()
        own = [end.usage.prompt_tokens - before for end in ends.values()]
        # Besides its end each branch computes one generated token. The shared text is followed by
        # markup that the branches have in common too, so some of that may be shared as well.
        assert stats.computed_tokens <= before + sum(own) + 5
        assert stats.computed_tokens > before + max(own)
        # The common prefix was computed before the first of them requested it.
        assert all(end.usage.cached_tokens >= before for end in ends.values())
        assert stats.rerendered_tokens == 0


async def test_salts_and_tenants_have_caches_of_their_own():
    keys = [("", ""), ("a", ""), ("", "a"), ("a", "b/c"), ("a/b", "c"), ("1/a", ""), ("", "1/a/")]
    async with plain_model_engine() as client:
        for round_number in range(2):
            for tenant, salt in keys:
                generator = generator_on(client, tenant)
                context = generator.open(salt)
                generator.fill(context, "the same question for all of them")
                [fork] = await generator.fork(context, 1)
                end = await generate(generator, fork, max_tokens=1)
                assert end.usage.cached_tokens == round_number * (end.usage.prompt_tokens - 1)


@given(chunks=st.lists(texts, max_size=5))
async def test_text_is_the_same_in_one_piece_or_in_many(chunks):
    async with plain_model_engine() as client:
        generator = generator_on(client)
        one, many = generator.open(""), generator.open("")
        generator.fill(one, "".join(chunks))
        for chunk in chunks:
            generator.fill(many, chunk)
        assert prompt_of(one) == prompt_of(many)
        assert not SPECIAL_IDS & set(prompt_of(one))


@pytest.mark.on_trio
async def test_a_long_text_is_encoded_outside_the_loop_with_the_same_ids():
    text = "the answer to the question " * (MAX_INLINE_CHARS // 20)
    async with plain_model_engine(max_context=4096) as client:
        generator = generator_on(client)
        context = generator.open("")
        generator.fill(context, text)
        with anyio.CancelScope() as scope:  # a fork that is given up while its text is encoded
            scope.cancel()
            await generator.fork(context, 2)
        assert scope.cancelled_caught
        end = await generate(generator, context, max_tokens=1)
        assert end.usage.prompt_tokens == len(TOKENIZER.encode(text))
        assert context.num_unencoded_chars == 0


@pytest.mark.on_trio
async def test_turns_are_laid_out_outside_the_loop_up_to_the_length_of_the_context(monkeypatch):
    threads: list[int] = []
    settle = token_state.TokenState._settle

    def settled(state: token_state.TokenState) -> None:
        threads.append(threading.get_ident())
        settle(state)

    monkeypatch.setattr(token_state.TokenState, "_settle", settled)
    async with plain_model_engine(max_context=300) as client:
        generator = generator_on(client)
        context = generator.open("")
        for _ in range(300):
            fill_turn(generator, context, "user", "")
        with pytest.raises(af.PromptTooLong, match=r"\b300\b"):
            generator.begin_role(context, "user")
        branches = await generator.fork(context, 2, ahead=False)
        assert threading.get_ident() != threads[0]
        with pytest.raises(af.PromptTooLong, match=r"\b300\b"):
            generator.begin_role(branches[0], "user")
        for one in (context, *branches):
            generator.free(one)


async def test_reading_the_ids_of_a_long_text_encodes_it_once_outside_the_loop(monkeypatch):
    encoded_in: list[int] = []
    encoded = token_state.encode_spans

    def encode_spans(*args: Any) -> Any:
        encoded_in.append(threading.get_ident())
        return encoded(*args)

    monkeypatch.setattr(token_state, "encode_spans", encode_spans)
    text = "the answer to the question " * (MAX_INLINE_CHARS // 20)
    async with plain_model_engine(max_context=4096) as client:
        generator = generator_on(client)
        context = generator.open("")
        generator.fill(context, text)
        for _ in range(3):
            assert await generator.token_ids(context) == TOKENIZER.encode(text)
        assert len(encoded_in) == 1
        assert encoded_in[0] != threading.get_ident()
        generator.fill(context, "is the")
        assert await generator.token_ids(context) == TOKENIZER.encode(text + "is the")
        [child] = await generator.fork(context, 1)
        assert await generator.token_ids(child) == TOKENIZER.encode(text + "is the")
        assert len(encoded_in) == 3


async def test_f37_a_long_text_that_the_template_rejects_at_first_is_encoded_outside_the_loop(monkeypatch):
    """A turn of the system alone is rejected, so a fork encodes nothing, and each child all of it."""
    encoded_in: list[int] = []
    encoded = token_state.encode_spans

    def encode_spans(*args: Any) -> Any:
        encoded_in.append(threading.get_ident())
        return encoded(*args)

    monkeypatch.setattr(token_state, "encode_spans", encode_spans)
    rejects = "{% if messages[-1].role == 'system' %}{{ raise_exception('no question') }}{% endif %}"
    async with plain_model_engine(max_context=4096) as client:
        generator = EngineGenerator(client, ChatTemplate(rejects + TEMPLATE.source))
        context = generator.open("")
        fill_turn(generator, context, "system", "the answer to the question " * (MAX_INLINE_CHARS // 20))
        for child in await generator.fork(context, 2):
            fill_turn(generator, child, "user", "is the")
            generator.begin_role(child, "assistant")
            await generate(generator, child, max_tokens=1)
    assert len(encoded_in) == 2
    assert threading.get_ident() not in encoded_in


@pytest.mark.on_trio
async def test_a_generation_that_is_given_up_leaves_its_context_as_it_was():
    gate = StepGate()
    gate.attach()
    async with plain_model_engine(on_step=gate) as client:
        generator = generator_on(client)
        context = generator.open("")
        generator.fill(context, "the question")
        prompt = prompt_of(context)
        gate.allow(3)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: generate(generator, context, max_tokens=50, ignore_eos=True))
                await gate.held()
                scope.cancel()
        gate.open()
        assert prompt_of(context) == prompt
        end = await generate(generator, context, max_tokens=4)
        assert end.text == alone(prompt, SamplingParams(max_tokens=4)).text


@pytest.mark.on_trio
@pytest.mark.parametrize("call", ["generate", "score"])
async def test_a_call_cancelled_before_it_is_submitted_sends_nothing(call):
    sent: list[object] = []
    async with plain_model_engine() as client:
        client.observe(SimpleNamespace(sent=sent.append, received=lambda messages: None))
        generator = generator_on(client)
        context = generator.open("")
        generator.fill(context, "the question")
        with anyio.CancelScope() as scope:
            scope.cancel()
            if call == "generate":
                await generate(generator, context, max_tokens=4)
            else:
                await generator.score(context, CHOICES, "token_length_normalized")
        assert scope.cancelled_caught
        assert sent == []
        assert (await generate(generator, context, max_tokens=4)).usage.output_tokens == 4
        assert len(sent) == 1


async def test_an_empty_state_cannot_be_continued():
    async with plain_model_engine() as client:
        generator = generator_on(client)
        with pytest.raises(af.errors.BadArgument, match=r"^gen "):
            await generate(generator, generator.open(""))
        with pytest.raises(af.errors.BadArgument, match=r"^select "):
            await generator.score(generator.open(""), CHOICES, "token_length_normalized")


async def test_a_select_that_cannot_run_says_why_once():
    async with plain_model_engine(max_context=64) as client:
        generator = generator_on(client)
        context = generator.open("")
        generator.fill(context, "x " * 100)
        with pytest.raises(af.PromptTooLong, check=has_param("prompt")):
            await generator.score(context, CHOICES, "token_length_normalized")
        with pytest.raises(af.PromptTooLong, check=has_param("prompt")):
            await generator.score(context, CHOICES, "unconditional_likelihood_normalized")
        assert client.num_calls == 0


async def test_a_select_whose_forward_pass_fails_says_why_once(caplog):
    def fail(batch) -> None:
        raise ZeroDivisionError

    async with plain_model_engine(on_step=fail) as client:
        generator = generator_on(client)
        context = generator.open("")
        generator.fill(context, "the question")
        with pytest.raises(af.errors.EngineFailed, match="the forward pass failed"):
            await generator.score(context, CHOICES, "token_length_normalized")
        assert prompt_of(context) == TOKENIZER.encode("the question")


async def test_a_model_without_a_template_has_no_roles():
    async with plain_model_engine() as client:
        generator = EngineGenerator(client, ChatTemplate(None))
        assert generator.capabilities == Capabilities(
            "fake", roles=False, max_context=512, watch=True, default_max_tokens=256
        )
        assert generator_on(client).capabilities.roles
        with pytest.raises(af.errors.NotSupported):
            generator.begin_role(generator.open(""), "user")


async def test_the_seed_of_a_gen_reaches_the_engine():
    async with plain_model_engine(next_token=None) as client:
        generator = generator_on(client)
        context = generator.open("")
        generator.fill(context, "the question")
        outputs = []
        for seed, branch in zip((1, 1, 2), await generator.fork(context, 3), strict=True):
            await generate(generator, branch, max_tokens=8, temperature=1.0, seed=seed)
            outputs.append(branch.tokens.ids())
        assert outputs[0] == outputs[1] != outputs[2]


async def test_tokens_of_a_waiting_state_are_marked_as_ahead_and_those_before_forks_are_not():
    async with plain_model_engine() as client:
        submitted: list[Submit] = []
        client.observe(SimpleNamespace(sent=submitted.append, received=lambda message: None))
        generator = generator_on(client)
        context = generator.open("")
        fill_turn(generator, context, "user", "x " * 100)
        await generator.fill_ahead(context)
        branches = await generator.fork(context, 2)
        for one in (context, *branches):
            generator.free(one)
        assert [message.origin.is_ahead for message in submitted] == [True, False]


# The same through the whole frontend.


def plain(engine: FakeEngine) -> FakeEngine:
    engine.runner._next_token = plain_token
    return engine


async def test_a_programs_next_turn_is_cached_up_to_its_last_token():
    engine = plain(FakeEngine())
    async with af.session(backend=engine) as flow, flow.state() as s:
        s += af.system("Be brief.")
        usages = []
        for number in range(5):
            s += af.user(f"question {number}")
            s += af.assistant(af.gen("answer", max_tokens=10, ignore_eos=True))
            await s
            usages.append(s["answer"].usage)
        for earlier, later in pairwise(usages):
            assert later.cached_tokens == earlier.prompt_tokens + earlier.output_tokens - 1
        await engine.assert_idle()


async def test_wired_values_are_encoded_as_the_text_that_they_are():
    """A value that is wired gives the very same prompt as the same text appended by hand."""
    engine = plain(FakeEngine())
    async with af.session(backend=engine) as flow, flow.state() as source:
        source += "begin " + af.gen("x", max_tokens=10)
        prompts = []
        for wired in (source["x"], await source["x"]):
            async with flow.state() as s:
                s += af.user("Say: ", wired, " twice")
                s += af.assistant(af.gen("y", max_tokens=1))
                await s
                prompts.append(s["y"].usage)
        assert prompts[0].prompt_tokens == prompts[1].prompt_tokens == prompts[1].cached_tokens + 1


async def test_f37_a_limit_of_tokens_ends_requests_while_they_run():
    engine = plain(FakeEngine())
    async with af.session(backend=engine) as flow, flow.state() as s:
        s += "begin"
        await s
        engine.gate.allow(0)
        s.limit(output_tokens=10)
        branches = s.fork(8)
        for branch in branches:
            branch += af.gen("x", max_tokens=200, ignore_eos=True)

        async def run_step_by_step() -> None:
            while True:
                await engine.gate.held()
                engine.gate.allow(1)

        async with anyio.create_task_group() as group:
            group.start_soon(run_step_by_step)
            for branch in branches:
                with pytest.raises(af.BudgetExceeded):
                    await branch["x"]
            group.cancel_scope.cancel()
        engine.gate.open()
        assert (await flow.stats()).generated_tokens <= 10 + 2 * len(branches)
        await engine.assert_idle()


async def test_states_under_different_salts_share_nothing():
    engine = plain(FakeEngine())
    async with af.session(backend=engine) as flow:
        cached = []
        for salt in ("a", "b", "a"):
            async with flow.state(cache_salt=salt) as s:
                branch = s.fork(1)[0]
                branch += "the same question" + af.gen("x", max_tokens=1)
                await branch
                cached.append(branch["x"].usage.cached_tokens > 0)
        assert cached == [False, False, True]


async def test_a_prompt_that_is_too_long_fails_its_own_state_only():
    engine = plain(FakeEngine())
    async with af.session(backend=engine) as flow, flow.state() as s:
        long, short = s.fork(2)
        for branch, text in ((long, "x " * 2000), (short, "x ")):
            branch += text + af.gen("x", max_tokens=3) + af.select("y", list(CHOICES))
        assert await short["y"] in CHOICES
        with pytest.raises(af.PromptTooLong):
            await long["x"]
        with pytest.raises(af.PromptTooLong, match="'y'") as caught:
            await long["y"]
        assert isinstance(caught.value.__cause__, af.PromptTooLong)
        await engine.assert_idle()


@pytest.mark.parametrize("num_words", [1_100, 2_000, 50_000])
async def test_f24c_a_prompt_that_is_too_long_is_one_error_however_long_it_is(num_words):
    engine = plain(FakeEngine())
    async with af.session(backend=engine) as flow:
        async with flow.state() as s:
            s += "x " * num_words + af.gen("x", max_tokens=3)
            for waits in (s["x"], s):
                with pytest.raises(af.PromptTooLong):
                    await waits
        async with flow.state() as s:
            s += "x " * num_words
            for deeper in s.fork(2)[0].fork(2):
                deeper += af.select("y", list(CHOICES))
                with pytest.raises(af.PromptTooLong):
                    await deeper["y"]
        async with flow.state() as s:
            s.set("long", "x " * num_words)
            s += s["long"]
            s += af.gen("x", max_tokens=3)
            with pytest.raises(af.PromptTooLong):
                await s["x"]
        await engine.assert_idle()


async def test_text_far_too_long_is_encoded_in_pieces(monkeypatch):
    lengths: list[int] = []
    encode = TOKENIZER._encoding

    def encoding(whole, text):
        lengths.append(len(text))
        return encode(whole, text)

    monkeypatch.setattr(TOKENIZER, "_encoding", encoding)
    async with plain_model_engine(max_context=4_000) as client:
        generator = generator_on(client)
        for length, num_turns in ((3 * PIECE_CHARS // 2, 0), (PIECE_CHARS // 4, 4)):
            context = generator.open("")
            generator.fill(context, "x" * length)
            for _ in range(num_turns):
                fill_turn(generator, context, "user", "x" * length)
            for run in (
                partial(generator.fork, context, 2),
                partial(generate, generator, context),
                partial(generator.score, context, CHOICES, "token_length_normalized"),
            ):
                with pytest.raises(af.PromptTooLong):
                    await run()
            generator.free(context)
    assert max(lengths) == PIECE_CHARS


async def test_text_that_fits_is_not_counted_again(monkeypatch):
    counted: list[int] = []
    check = PromptLimits.check_texts

    def check_texts(limits, texts, **options):
        counted.append(sum(map(len, texts)))
        check(limits, texts, **options)

    monkeypatch.setattr(PromptLimits, "check_texts", check_texts)
    async with plain_model_engine(max_context=4_000) as client:
        generator = generator_on(client)
        context = generator.open("")
        for _ in range(3):
            fill_turn(generator, context, "user", "x " * 1_000)
            await generator.fork(context, 1, ahead=False)
        generator.free(context)
    assert len(counted) >= 3
    assert max(counted[-3:]) < 2_500


async def test_f24c_what_depends_on_another_states_prompt_has_it_as_its_cause():
    engine = plain(FakeEngine())
    async with af.session(backend=engine) as flow, flow.state() as s, flow.state() as other:
        s += "x " * 50_000 + af.gen("x", max_tokens=3)
        other += s["x"]
        other += af.gen("y", max_tokens=3)
        with pytest.raises(af.errors.RunFailed) as caught:
            await other["y"]
        assert isinstance(caught.value.__cause__, af.PromptTooLong)
        await engine.assert_idle()


class SubmitObserver:
    """Records the messages to the engine."""

    def __init__(self) -> None:
        self.submits: list[Submit] = []

    def sent(self, submit: Submit) -> None:
        self.submits.append(submit)

    def received(self, messages) -> None:
        pass


@pytest.mark.on_trio
async def test_states_that_name_one_program_are_siblings():
    async with plain_model_engine(SchedulerConfig(), max_context=2048, num_slots=4096) as client:
        generator = generator_on(client)
        first, second = generator.open("", program="p"), generator.open("salt", program="p")
        other, alone = generator.open("", program="q"), generator.open("")
        assert first.origin.task_group == second.origin.task_group != 0
        assert len({context.origin.task_group for context in (first, other, alone)}) == 3
        assert alone.origin.task_group == 0
        [copy] = await generator.fork(first, 1)
        branches = await generator.fork(first, 2)
        assert copy.origin.task_group == first.origin.task_group
        assert len({context.origin.task_group for context in (first, *branches)}) == 2
        without_hints = EngineGenerator(client, generator.template, use_hints=False)
        assert without_hints.open("", program="p").origin.task_group == 0


@pytest.mark.on_trio
async def test_hints_go_with_the_requests_that_follow():
    observer = SubmitObserver()
    async with plain_model_engine(SchedulerConfig(), max_context=2048, num_slots=4096) as client:
        generator = generator_on(client)
        generator.observe(observer)
        context = generator.open("")
        generator.fill(context, "one two three " * 20)
        await generator.generate(context, GenParams(max_tokens=2), lambda text: None)
        generator.hint(context, StateHint("throughput", 7, None, 60.0))
        await generator.generate(context, GenParams(max_tokens=2), lambda text: None)
        generator.fill(context, "four five six " * 20)
        generator.hint(context, StateHint(None, None, 3))
        before = len(observer.submits)
        children = await generator.fork(context, 3)
        await generator.generate(children[0], GenParams(max_tokens=2), lambda text: None)
        for one in (context, *children):
            generator.free(one)
    first, second, ahead, last = observer.submits
    assert (first.origin.objective, first.origin.output_tokens) == ("latency", 0)
    assert first.origin.deadline_s is None
    for later in (second, ahead, last):
        assert 0 < later.origin.deadline_s <= 60.0
        assert (later.origin.objective, later.origin.output_tokens) == ("throughput", 7)
    assert before == 3  # the prefix was computed when the forks were announced, and not again
    assert ahead.params is None
    assert last.token_ids[: len(ahead.token_ids)] == ahead.token_ids


@pytest.mark.on_trio
async def test_a_hint_goes_with_later_requests_and_reaches_those_that_wait():
    observer = SubmitObserver()
    engine = FakeEngine()
    async with engine.open_client() as client:
        generator = EngineGenerator(client, TEMPLATE)
        generator.observe(observer)
        context = generator.open("", program="p")
        generator.fill(context, "one two three")
        generator.hint(
            context, StateHint(scheduling=SchedulingHint(program=3, group=4, objective="throughput"))
        )
        [copy] = await generator.fork(context, 1)
        for one in (context, copy):
            await generator.generate(one, GenParams(max_tokens=2), lambda text: None)
        engine.gate.allow(0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generator.generate, context, GenParams(max_tokens=3), lambda text: None)
            await engine.gate.held()
            generator.hint(context, StateHint(scheduling=SchedulingHint(program=5, tpot_s=0.5)))
            generator.hint(context, StateHint("throughput"))
            engine.gate.allow(1)
            await engine.gate.held()
            [running] = engine.client.engine.scheduler.running.values()
            assert (running.origin.program, running.origin.objective) == (5, "throughput")
            assert running.origin.tpot_s == 0.5
            engine.gate.open()
        for one in (context, copy):
            generator.free(one)
        without = EngineGenerator(client, TEMPLATE, use_hints=False)
        unhinted = without.open("")
        without.hint(unhinted, StateHint(scheduling=SchedulingHint(program=3)))
        assert unhinted.origin_now().program == 0
    first, copied, _ = [submit.origin for submit in observer.submits]
    assert (first.program, first.objective) == (3, "throughput")
    assert (copied.program, copied.objective) == (3, "throughput")
    assert first.task_group != copied.task_group == context.origin.task_group
    assert context.origin_now().task_group == context.origin.task_group
    assert context.origin_now().objective == "throughput"


async def test_a_request_that_begins_brings_the_hint_of_its_state(monkeypatch):
    observer = SubmitObserver()
    updates: list[UpdateHint] = []
    async with FakeEngine().open_client() as client:
        monkeypatch.setattr(client, "update_hint", updates.append)
        generator = EngineGenerator(client, TEMPLATE)
        generator.observe(observer)
        context = generator.open("")
        generator.fill(context, "one two three")
        await generator.generate(context, GenParams(max_tokens=2), lambda text: None)
        generator.hint(context, StateHint(scheduling=SchedulingHint(program=3, steps=None, returns_s=0.5)))
        generator.hint(
            context, StateHint(scheduling=SchedulingHint(program=3, objective="throughput"), begins=True)
        )
        await generator.generate(context, GenParams(max_tokens=2), lambda text: None)
    assert [(one.steps, one.returns_s) for one in updates] == [(None, 0.5)]
    assert [one.origin.objective for one in observer.submits] == ["latency", "throughput"]


async def test_a_tenant_that_sees_no_metrics_has_only_its_own_counters():
    async with FakeEngine().open_client() as client:
        ann = EngineGenerator(client, TEMPLATE, tenant=Tenant("ann"))
        eve = EngineGenerator(client, TEMPLATE, tenant=Tenant("eve", sees_metrics=True))
        for generator in (ann, ann, eve):
            context = generator.open("")
            generator.fill(context, "some words")
            await generator.generate(context, GenParams(max_tokens=3), lambda text: None)
            generator.free(context)
        everything, own = await eve.stats(), await ann.stats()
    assert everything.steps > 0
    assert everything.generated_tokens == 9
    prompt_tokens = everything.prompt_tokens * 2 // 3
    shown = {
        "model": "fake",
        "prompt_tokens": prompt_tokens,
        "cached_tokens": everything.cached_tokens,
        "generated_tokens": 6,
        "rerendered_tokens": 0,
        **dict.fromkeys(("cost", "saved_calls", "saved_tokens", "failed_speculations"), 0),
        "endpoints": (),
        "hedged_calls": 0,
    }
    hidden = dict.fromkeys(set(Stats.__struct_fields__) - set(shown))
    assert own == Stats(**shown, **hidden)  # f25e: not zeros
