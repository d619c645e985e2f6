"""Questions about a state on the engine: all in one tree, against one scoring request for each answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chat_template_shapes import CHATML, THINKING
from support.fake_engine import TEMPLATE, TOKENIZER
from support.faults import has_param
from support.plain_model import END_ID, plain_model_engine
from support.reasoning_models import DEEPSEEK, QWEN

import agentflow as af
from agentflow.engine.client import EngineClient
from agentflow.engine.generator import decide
from agentflow.engine.generator.context import EngineContext
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.generator.select import MAX_AT_ONCE
from agentflow.engine.messages import Finished, FromEngine
from agentflow.engine.request import Submit
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.state.token_state import TokenState
from agentflow.protocol.decisions import Option, Question, compute_probabilities, question_text
from agentflow.protocol.sampling import SamplingParams
from agentflow.runtime.task_group import open_task_group

pytestmark = pytest.mark.anyio

END_OF_TURN = TOKENIZER.encode_markup("<|im_end|>", continues=True)
Turns = list[tuple[str, str]]


def opened(
    client: EngineClient, turns: Turns, *, leaves_open: bool = False
) -> tuple[EngineGenerator, EngineContext]:
    generator = EngineGenerator(client, TEMPLATE)
    context = generator.open("")
    for number, (role, text) in enumerate(turns):
        if role:
            generator.begin_role(context, role)
        generator.fill(context, text)
        if role and not (leaves_open and number == len(turns) - 1):
            generator.end_role(context)
    return generator, context


async def by_hand(client: EngineClient, turns: Turns, question: Question) -> tuple[float, ...]:
    """The reference: each answer written out as a whole conversation, and scored alone."""
    logprobs = []
    for answer in question.answers:
        if turns[0][0]:
            text = question_text(question)
            said = [*turns]
            if said[-1][0] == "user":
                said[-1] = ("user", f"{said[-1][1]}\n\n{text}")
            else:
                said.append(("user", text))
            written = "".join([f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in said])
            state = TokenState(TOKENIZER, TEMPLATE)
            for role, content in said:
                state.begin_role(role)
                state.text(content)
                state.end_role()
            state.begin_role("assistant")
            prompt = state.ids()
            state.text(answer)
            ids = [*state.ids(), *END_OF_TURN]
            assert state.text_view().endswith(f"{written}<|im_start|>assistant\n{answer}")
        else:
            state = TokenState(TOKENIZER, TEMPLATE)
            state.text(f"{turns[0][1]}\n\n{question_text(question)}\nAnswer:")
            prompt = state.ids()
            ids = TOKENIZER.encode(state.text_view() + f" {answer}\n")
        end = await client.score(ids, len(prompt))
        logprobs.append(sum(end.logprobs))
    return compute_probabilities(logprobs)


words = st.lists(st.sampled_from(["the", " an", "swer", " question", "s", "é"]), min_size=1, max_size=3).map(
    "".join
)
turns = st.one_of(
    words.map(lambda text: [("", text)]),
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), words), min_size=1, max_size=3),
)
options = st.lists(words.map(Option), min_size=2, max_size=4, unique_by=lambda option: option.text).map(tuple)
questions = st.lists(
    st.one_of(
        st.builds(Question, words, st.just("predicate"), words),
        st.builds(Question, words, st.sampled_from(["choice", "score"]), st.just("") | words, options),
    ),
    min_size=1,
    max_size=4,
)


@given(
    turns=turns,
    questions=questions,
    budget=st.sampled_from([16, 512]),
    max_nodes=st.sampled_from([20, 8192]),
    longest=st.sampled_from([24, 256]),
)
async def test_answers_have_the_probabilities_of_one_by_one(turns, questions, budget, max_nodes, longest):
    config = SchedulerConfig(token_budget=budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decide, "MAX_NODES", max_nodes)
        patch.setattr(decide, "MAX_TREE_TOKENS", longest)
        async with plain_model_engine(config, end_token_ids=(END_ID, *END_OF_TURN)) as client:
            generator, context = opened(client, turns)
            before = context.tokens.text_view()
            found = await generator.decide(context, questions)
            assert context.tokens.text_view() == before
            for question, probabilities in zip(questions, found.probabilities, strict=True):
                assert probabilities == pytest.approx(await by_hand(client, turns, question), abs=1e-9)
            generator.free(context)


async def test_each_distinct_token_is_computed_once():
    asked = [
        Question(f"q{number}", "choice", f"the question {number}", (Option("one"), Option("other")))
        for number in range(40)
    ]
    config = SchedulerConfig(token_budget=512)
    async with plain_model_engine(config, num_slots=16384, end_token_ids=(END_ID, *END_OF_TURN)) as client:
        generator, context = opened(client, [("user", "the text of it " * 20)])
        await generator.decide(context, asked)
        encoded = decide.encode_questions(context.tokens, asked, END_OF_TURN)
        stats = await client.stats()
    whole = [
        encoded.prompt + head + ids
        for head, answers in zip(encoded.heads, encoded.answers, strict=True)
        for ids in answers
    ]
    needed = {tuple(ids[:end]) for ids in whole for end in range(1, len(ids))}
    assert len(needed) <= stats.computed_tokens <= 1.05 * len(needed)
    assert stats.in_use_slots == 0


@pytest.mark.parametrize("kind", ["choice", "score"])
async def test_equal_answers_of_several_questions_are_computed_once(kind):
    listed = (Option("one", "the first " * 20), Option("other", "the second " * 20))
    asked = [Question(f"q{number}", kind, f"the question {number}", listed) for number in range(40)]
    num_listed = sum([len(TOKENIZER.encode(option.shown)) for option in listed])
    async with plain_model_engine(num_slots=16384, end_token_ids=(END_ID, *END_OF_TURN)) as client:
        generator, context = opened(client, [("user", "what?")])
        await generator.decide(context, asked[:1])
        num_first = (await client.stats()).computed_tokens
        await generator.decide(context, asked)
        num_computed = (await client.stats()).computed_tokens - num_first
    assert num_computed < num_first + (len(asked) - 1) * num_listed


async def test_the_state_goes_on_as_if_nothing_had_been_asked():
    turns = [("system", "the"), ("user", "what?")]
    async with plain_model_engine(end_token_ids=(END_ID, *END_OF_TURN)) as client:
        generator, context = opened(client, turns)
        await generator.decide(context, [Question("a", "predicate")])
        generator.begin_role(context, "assistant")
        _, untouched = opened(client, turns)
        generator.begin_role(untouched, "assistant")
        assert context.tokens.ids() == untouched.tokens.ids()


async def test_an_open_turn_of_the_assistant_is_refused_and_one_of_the_user_goes_on():
    async with plain_model_engine(end_token_ids=(END_ID, *END_OF_TURN)) as client:
        generator, context = opened(client, [("user", "what?"), ("assistant", "the")], leaves_open=True)
        with pytest.raises(af.errors.BadArgument):
            await generator.decide(context, [Question("a", "predicate")])
        generator, context = opened(client, [("user", "what?")], leaves_open=True)
        found = await generator.decide(context, [question := Question("a", "predicate")])
        assert found.probabilities[0] == pytest.approx(await by_hand(client, [("user", "what?")], question))


@pytest.mark.parametrize("source", [CHATML, THINKING, QWEN], ids=["plain", "reasoning", "qwen"])
def test_answers_end_with_the_turn_where_a_template_rewrites_it(source):
    state = TokenState(TOKENIZER, ChatTemplate(source))
    state.begin_role("user")
    state.text("what?")
    state.end_role()
    asked = [Question("a", "choice", "", (Option("no"), Option("not sure")))]
    [answers] = decide.encode_questions(state, asked, END_OF_TURN).answers
    assert all(ids[-1:] == END_OF_TURN for ids in answers)


def test_answers_follow_no_reasoning_that_the_prompt_begins():
    state = TokenState(TOKENIZER, ChatTemplate(DEEPSEEK))
    state.begin_role("user")
    state.text("what?")
    state.end_role()
    encoded = decide.encode_questions(state, [Question("a", "predicate"), Question("b", "predicate")], ())
    for head in encoded.heads:
        text = TOKENIZER.decode(encoded.prompt + head, skip_special=False)
        assert text.endswith("<|assistant|><think>\n\n</think>\n\n")


async def test_steps_with_parts_of_questions_only_leave_generations_alone():
    asked = [Question(f"q{number}", "predicate", f"the question {number} " * 8) for number in range(4)]
    config = SchedulerConfig(token_budget=16)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    async with plain_model_engine(config, end_token_ids=(END_ID, *END_OF_TURN)) as client:
        generator, context = opened(client, [("user", "what?")])
        ends: list[Finished] = []

        async def generate() -> None:
            ends.append(await client.generate([5, 6, 7], params, seed=1))

        async with open_task_group() as tasks:
            tasks.start_soon(generate)
            await anyio.lowlevel.checkpoint()
            found = await generator.decide(context, asked)
    assert len(ends[0].token_ids) == 100
    assert [sum(one) for one in found.probabilities if one is not None] == pytest.approx([1] * 4)


async def test_many_long_questions_take_turns():
    class Unfinished:
        numbers: ClassVar[list[int]] = [0]

        def sent(self, message: Submit) -> None:
            self.numbers.append(self.numbers[-1] + 1)

        def received(self, messages: Sequence[FromEngine]) -> None:
            ended = sum([isinstance(message, Finished) for message in messages])
            self.numbers.append(self.numbers[-1] - ended)

    texts = [f"{number} " + "the question " * 150 for number in range(40)]
    asked = [Question(text[:2], "predicate", text) for text in texts]
    async with plain_model_engine(
        num_slots=65536, max_context=32768, end_token_ids=(END_ID, *END_OF_TURN)
    ) as client:
        client.observe(seen := Unfinished())
        generator, context = opened(client, [("user", "what?")])
        await generator.decide(context, asked)
        generator.free(context)
    assert len(asked) < len(seen.numbers)
    assert max(seen.numbers) <= MAX_AT_ONCE


async def test_questions_may_be_longer_together_than_a_prompt():
    asked = [Question(f"q{number}", "predicate", f"the question {number} " * 8) for number in range(150)]
    assert TOKENIZER.fewest_tokens(sum([len(question_text(question)) for question in asked])) > 512
    async with plain_model_engine(end_token_ids=(END_ID, *END_OF_TURN)) as client:
        generator, context = opened(client, [("user", "what?")])
        found = await generator.decide(context, asked)
    assert len(found.probabilities) == len(asked)


async def test_questions_that_do_not_fit_fail_alone():
    long = [Question("a", "predicate", "the question " * 400)]
    async with plain_model_engine(end_token_ids=(END_ID, *END_OF_TURN)) as client:
        generator, context = opened(client, [("user", "what?")])
        with pytest.raises(af.PromptTooLong, check=has_param("prompt")):
            await generator.decide(context, long)
        with pytest.raises(af.PromptTooLong):
            await generator.decide(context, [Question("a", "predicate")], max_tokens=20)
        found = await generator.decide(context, [Question("a", "predicate")], max_tokens=500)
        assert sum(found.probabilities[0]) == pytest.approx(1)
