"""Selects through the whole engine: every choice in one pass, against a scoring request for each."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import TEMPLATE, TOKENIZER, FakeEngine, StepGate
from support.faults import has_param
from support.plain_model import END_ID, alone, fake_logprob, plain_model_engine, runner
from support.process_engine import Hold, kill, process_engine
from support.reasoning_models import DEEPSEEK, QWEN

import agentflow as af
from agentflow.engine.client import EngineClient
from agentflow.engine.generator import select
from agentflow.engine.generator.context import EngineContext
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.messages import Finished
from agentflow.engine.request import GREEDY
from agentflow.engine.runner import OutOfMemory
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.state.choices import EncodedChoices, compute_scores
from agentflow.engine.token_tree import MAX_CHOICE_TOKENS
from agentflow.protocol.sampling import SamplingParams

pytestmark = pytest.mark.anyio

PROMPT = list(range(10, 30))
CHOICES = [[1, 2, 3], [1, 2], [4], [1, 5, 6, 7]]
METHODS = ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]


def expected_logprobs(prompt: list[int], choices: list[list[int]]) -> list[list[float]]:
    """The plain engine's, which scores each choice by itself."""
    return [*alone(prompt, GREEDY, choices=choices).choice_logprobs]


async def one_by_one(client: EngineClient, prompt: list[int], choices: list[list[int]]) -> list[list[float]]:
    """The reference: one scoring request for each choice."""
    ends = [await client.score(prompt + choice, len(prompt)) for choice in choices]
    return [end.logprobs for end in ends]


async def test_choices_are_scored_as_one_by_one():
    async with plain_model_engine() as client:
        for num_cached in (0, len(PROMPT) - 1):
            end = await client.score_choices(PROMPT, CHOICES)
            assert end.choice_logprobs == expected_logprobs(PROMPT, CHOICES)
            assert (end.prompt_tokens, end.cached_tokens, end.output_tokens) == (20, num_cached, 0)
            assert (end.token_ids, end.text, end.logprobs) == ([], "", [])
        stats = await client.stats()
        assert (stats.steps, stats.cached_slots) == (2, len(PROMPT))  # each in one forward pass
        assert end.choice_logprobs == await one_by_one(client, PROMPT, CHOICES)


HEADS = [[3, 1, 4], [3, 1], [], [3, 1, 5, 9, 2]]


@pytest.mark.parametrize("budget", [4, 64])
async def test_choices_after_heads_are_scored_as_after_longer_prompts(budget):
    head_of = [0, 0, 1, 1, 1, 2, 3]
    choices = [[1, 2, 3], [1, 2], [4], [1, 5, 6, 7], [4, 4], [8, 8], [9]]
    async with plain_model_engine(SchedulerConfig(token_budget=budget)) as client:
        for _ in range(2):  # without a cached prompt, and with one
            end = await client.score_choices(PROMPT, choices, heads=HEADS, head_of=head_of)
            for choice, number, logprobs in zip(choices, head_of, end.choice_logprobs, strict=True):
                assert [logprobs] == expected_logprobs(PROMPT + HEADS[number], [choice])
        stats = await client.stats()
        assert stats.in_use_slots == 0


@pytest.mark.parametrize(("prompt", "choices"), [(PROMPT, [[1], []]), ([], [[1]])])
async def test_an_invalid_select_fails_alone(prompt, choices):
    async with plain_model_engine() as client:
        with pytest.raises((af.errors.BadArgument, af.errors.EngineFailed)):
            await client.score_choices(prompt, choices)
        with pytest.raises(af.PromptTooLong, check=has_param("prompt")):
            await client.score_choices([5] * 509, CHOICES)
        end = await client.score_choices(PROMPT, CHOICES)
        assert end.choice_logprobs == expected_logprobs(PROMPT, CHOICES)


async def test_a_select_that_is_given_up_gives_all_slots_back():
    """In the middle of its tree, while others run."""
    gate = StepGate()
    gate.attach()
    choices = [[a, b, 0] for a in range(5) for b in range(5)]
    ends: dict[str, Finished] = {}

    async def neighbour() -> None:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        ends["neighbour"] = await client.generate([9], params, seed=0, on_text=lambda text: None)

    async with plain_model_engine(SchedulerConfig(token_budget=8), on_step=gate) as client:
        gate.allow(5)
        async with anyio.create_task_group() as group:
            group.start_soon(neighbour)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(client.score_choices, PROMPT, choices)
                    await gate.held()
                    [request] = [r for r in client.engine.scheduler.running.values() if r.tree is not None]
                    assert 0 < request.num_nodes_computed < request.num_nodes
                    scope.cancel()
            gate.open()
        assert ends["neighbour"].output_tokens == 20
        stats = await client.stats()
        assert stats.in_use_slots == 0
        end = await client.score_choices(PROMPT, choices)
        assert end.choice_logprobs == expected_logprobs(PROMPT, choices)


async def test_a_select_whose_forward_pass_fails_gives_all_slots_back(caplog):
    def fail_late(batch) -> None:
        if batch.trees is not None and batch.trees.query_lens.sum() == 3:  # the tree's last piece
            raise ZeroDivisionError

    async with plain_model_engine(SchedulerConfig(token_budget=8), on_step=fail_late) as client:
        with pytest.raises(af.errors.EngineFailed, match="the forward pass failed"):
            await client.score_choices(PROMPT[:7], [[a, 0] for a in range(12)])
        stats = await client.stats()
        assert (stats.in_use_slots, stats.cached_slots) == (0, 7)


@pytest.mark.parametrize("capacity", [1, 3, 5, 7])
async def test_a_select_that_does_not_fit_into_memory_runs_in_halves(capacity):
    choices = [[a, b, 0] for a in range(5) for b in range(5)]

    def on_step(batch) -> None:
        if len(batch.token_ids) > capacity:
            raise OutOfMemory

    async with plain_model_engine(SchedulerConfig(token_budget=8), on_step=on_step) as client:
        end = await client.score_choices(PROMPT, choices)
        assert end.choice_logprobs == expected_logprobs(PROMPT, choices)


async def test_a_select_is_run_again_when_its_process_dies(tmp_path):
    hold = Hold(tmp_path / "hold")
    ends: list[Finished] = []

    async def score() -> None:
        ends.append(await client.score_choices(PROMPT, CHOICES))

    async with process_engine(hold_at={"1": hold.path}) as client, anyio.create_task_group() as group:
        group.start_soon(score)
        await hold.reached()
        kill(client, hold)
    assert [end.choice_logprobs for end in ends] == [expected_logprobs(PROMPT, CHOICES)]


words = st.lists(st.sampled_from(["the", " an", "swer", " question", "s", "é"]), min_size=1, max_size=3).map(
    "".join
)


def opened(client: EngineClient, text: str, *, with_role: bool) -> tuple[EngineGenerator, EngineContext]:
    generator = EngineGenerator(client, TEMPLATE)
    context = generator.open("")
    if with_role:
        for role, said in (("user", "What?"), ("assistant", "")):
            generator.begin_role(context, role)
            generator.fill(context, said)
            if said:
                generator.end_role(context)
    generator.fill(context, text)
    return generator, context


@pytest.mark.parametrize("method", METHODS)
@given(text=words, choices=st.lists(words, min_size=1, max_size=6, unique=True), with_role=st.booleans())
async def test_every_method_scores_what_is_appended(method, text, choices, with_role):
    async with plain_model_engine() as client:
        generator, context = opened(client, text, with_role=with_role)
        encoded = context.tokens.encode_choices(choices)
        end = await generator.score(context, choices, method)
        given = await one_by_one(client, encoded.prefix, encoded.ends)
        unconditional = []
        if method == "unconditional_likelihood_normalized":
            unconditional = await one_by_one(client, [client.info.end_token_ids[0]], encoded.ends)
        assert list(end.scores) == compute_scores(method, encoded.ends, given, unconditional)
        assert end.scores[end.index] == max(end.scores)
        assert context.tokens.ids() == encoded.prefix + encoded.ends[end.index]
        assert end.usage.prompt_tokens == len(encoded.prefix)  # counted once, for any method and choices


async def test_f37_a_model_without_tokens_at_the_ends_of_texts_scores_no_choices_without_a_prompt():
    engine = FakeEngine()
    async with af.session(backend=engine) as flow, flow.state() as s:
        s += "Is it? " + af.select("answer", ["yes", "no"], method=METHODS[-1])
        with pytest.raises(af.errors.BadArgument, check=has_param("method")):
            await s["answer"]


@given(text=words, choices=st.lists(words, min_size=1, max_size=6, unique=True), with_role=st.booleans())
async def test_a_likelihood_counts_the_end_where_another_choice_goes_on(text, choices, with_role):
    turn_end = TOKENIZER.encode_markup("<|im_end|>", continues=True)
    async with plain_model_engine(end_token_ids=(END_ID, *turn_end)) as client:
        generator, context = opened(client, text, with_role=with_role)
        encoded = context.tokens.encode_choices(choices)
        ends = [
            ids + ((turn_end if with_role else [END_ID]) if goes_on else [])
            for choice, ids in zip(choices, encoded.ends, strict=True)
            for goes_on in [any(other != choice and other.startswith(choice) for other in choices)]
        ]
        end = await generator.score(context, choices, "likelihood")
        assert end.scores == tuple(map(sum, await one_by_one(client, encoded.prefix, ends)))
        assert end.scores[end.index] == max(end.scores)
        assert context.tokens.ids() == encoded.prefix + encoded.ends[end.index]


@pytest.mark.parametrize("method", [*METHODS, "likelihood"])
@given(text=words, choices=st.lists(words, min_size=1, max_size=8, unique=True))
async def test_the_selected_choice_is_the_one_with_the_best_score(method, text, choices):
    """Through a program, for every method: choices of different lengths in tokens, too."""
    async with af.session(backend=FakeEngine(runner=runner())) as flow, flow.state() as s:
        s += text + af.select("x", choices, method=method)
        chosen = await s["x"]
        scores = s["x"].choices
    assert list(scores) == choices
    assert max(scores, key=scores.__getitem__) == chosen


@pytest.mark.parametrize("source", [DEEPSEEK, QWEN], ids=["opened", "not opened"])
@pytest.mark.parametrize("written", ["", "the answer is"])
async def test_choices_follow_no_reasoning_that_the_prompt_begins(source, written):
    async with plain_model_engine() as client:
        generator = EngineGenerator(client, ChatTemplate(source))
        context = generator.open("")
        generator.begin_role(context, "user")
        generator.fill(context, "what?")
        generator.end_role(context)
        generator.begin_role(context, "assistant")
        opening = generator.text(context)
        generator.fill(context, written)
        scored = await generator.score(context, ["the", "an"], METHODS[0])
        closing = "\n</think>\n\n" if source is DEEPSEEK else ""
        assert generator.text(context) == opening + closing + written + ["the", "an"][scored.index]
        ids = context.tokens.ids()
        assert TOKENIZER.decode(ids, skip_special=False) == generator.text(context)
        await generator.score(context, [" an", " question"], METHODS[0])
        assert context.tokens.ids()[: len(ids) - 1] == ids[:-1]  # it is closed once
        assert generator.text(context).count("</think>") == closing.count("</think>")


@pytest.mark.parametrize("written", ["so</think>the answer is", "so</think>"])
async def test_reasoning_that_the_program_ends_is_not_ended_again(written):
    async with plain_model_engine() as client:
        generator = EngineGenerator(client, ChatTemplate(DEEPSEEK))
        context = generator.open("")
        generator.begin_role(context, "user")
        generator.fill(context, "what?")
        generator.end_role(context)
        generator.begin_role(context, "assistant")
        generator.fill(context, written)
        before = generator.text(context)
        scored = await generator.score(context, ["the", "an"], METHODS[0])
        assert generator.text(context) == before + ["the", "an"][scored.index]


long_choices = st.lists(
    st.tuples(
        st.sampled_from([[], [1] * 5, [1] * 5 + [2], [1, 2, 1, 2]]),
        st.lists(st.integers(1, 2), min_size=1, max_size=8),
        st.sampled_from([[], [], [3] * 6]),
    ).map(lambda parts: [*parts[0], *parts[1], *parts[2]]),
    min_size=1,
    max_size=8,
)


@given(choices=long_choices, longest=st.integers(1, 6), budget=st.sampled_from([3, 8, 64]))
async def test_f8a_long_choices_are_scored_as_one_by_one(choices, longest, budget):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "MAX_TREE_TOKENS", longest)
        async with plain_model_engine(SchedulerConfig(token_budget=budget)) as client:
            _, context = opened(client, "the question", with_role=False)
            encoded = EncodedChoices(0, "", [""] * len(choices), PROMPT, choices)
            for method in METHODS:
                scores, end = await select.select_scores(client, context, encoded, method)
                start = [client.info.end_token_ids[0]]
                unconditional = expected_logprobs(start, choices)
                given_prompt = expected_logprobs(PROMPT, choices)
                assert scores == compute_scores(method, choices, given_prompt, unconditional)
                assert end.prompt_tokens == len(PROMPT)


async def test_f8b_a_select_of_long_choices_stalls_no_step():
    """Each step has one chunk at most, no node of a tree has a long path, and a stream goes on meanwhile."""
    choices = [[3, *[4] * 500, 5, *[6] * 500], [3, *[4] * 500, 7, *[8] * 500], [9] * 20]
    most, longest = 0, 0

    def on_step(batch) -> None:
        nonlocal most, longest
        most = max(most, len(batch.token_ids))
        longest = max(longest, 0 if batch.trees is None else batch.trees.paths.shape[1])

    config = SchedulerConfig(token_budget=64)
    async with plain_model_engine(config, max_context=2048, on_step=on_step) as client:
        _, context = opened(client, "the question", with_role=False)
        encoded = EncodedChoices(0, "", [""] * 3, PROMPT, choices)
        scores, _ = await select.select_scores(client, context, encoded, METHODS[0])
        stats = await client.stats()
    assert scores == compute_scores(METHODS[0], choices, expected_logprobs(PROMPT, choices), [])
    assert most <= 64
    assert longest < 500
    # The common part of the long ones is computed once, and a few tokens a second time for their logits.
    assert stats.computed_tokens < len(PROMPT) + 3 * 501 + 19 + 10


async def test_f8c_choices_that_are_too_long_together_fail_before_any_is_scored():
    async with plain_model_engine() as client:
        _, context = opened(client, "the question", with_role=False)
        encoded = EncodedChoices(0, "", ["", ""], PROMPT, [[7], [7] * MAX_CHOICE_TOKENS])
        with pytest.raises(af.errors.BadArgument, check=has_param("choices")):
            await select.select_scores(client, context, encoded, METHODS[0])
        too_long = EncodedChoices(0, "", ["", ""], PROMPT, [[7], [7] * 600])
        with pytest.raises(af.PromptTooLong, check=has_param("prompt")):
            await select.select_scores(client, context, too_long, METHODS[0])


async def test_the_pass_after_nothing_is_not_what_the_state_needs_next():
    """A state's prompt is kept longer than other cache; the start token alone is not its prompt."""
    async with plain_model_engine() as client:
        generator, context = opened(client, "the question", with_role=True)
        await generator.score(context, ["the", "an"], METHODS[2])
        await client.stats()
        [end] = client.engine.scheduler.memory.liveness._ends.values()
        assert end.match.num_tokens == len(context.tokens.ids()) - 1


async def test_a_select_over_a_thousand_choices_after_a_long_text():
    """Encoded in a thread, scored in two passes, and the text's ids are computed once."""
    text, choices = "the answer to the question is " * 60, [f"{number}" for number in range(1000)]
    async with plain_model_engine(
        SchedulerConfig(token_budget=1024), max_context=4096, num_slots=16384
    ) as client:
        generator, context = opened(client, text, with_role=False)
        end = await generator.score(context, choices, METHODS[0])
        stats = await client.stats()
        whole = [TOKENIZER.encode(text + choice) for choice in choices]
        assert context.tokens.ids() == whole[end.index]
        prefix = end.usage.prompt_tokens
        nodes = {tuple(ids[prefix:n]) for ids in whole for n in range(prefix + 1, len(ids))}
        assert stats.computed_tokens == prefix + len(nodes)
        assert stats.steps <= 1 + stats.computed_tokens // 1024
        values = [fake_logprob(whole[7][:n], whole[7][n]) for n in range(prefix, len(whole[7]))]
        assert end.scores[7] == pytest.approx(sum(values) / len(values))
