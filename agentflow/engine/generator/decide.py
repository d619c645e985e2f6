"""Answers questions about a state on the engine: all of them together, as one tree below the state.

Each question is a turn of the user after the state, and its possible answers are scored as the assistant's
turn. The answers follow the question in the tree (``token_tree``), so each distinct token is computed once.
An answer ends with the end of the turn: otherwise the beginning of another answer would be at least as likely
as that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from agentflow.engine.client import EngineClient
from agentflow.engine.generator.context import CHARS_PER_TURN, EngineContext
from agentflow.engine.generator.requests import TenantRequests
from agentflow.engine.generator.select import (
    MAX_AT_ONCE,
    MAX_TREE_TOKENS,
    RENDERINGS,
    Scoring,
    end_of_turn,
    extra_origin,
)
from agentflow.engine.messages import Finished
from agentflow.engine.request import Origin
from agentflow.engine.text.common_prefix import common_prefix
from agentflow.engine.text.state.token_state import TokenState
from agentflow.errors import BadArgument
from agentflow.protocol.decisions import Question, compute_probabilities, question_text
from agentflow.protocol.events import Usage
from agentflow.runtime.generator import Decided
from agentflow.runtime.task_group import first_error, open_task_group

MAX_NODES = 8192
"""The most nodes of one tree. More questions make several trees, of which only the first computes the
state."""
CHARS_PER_QUESTION = 500
"""Rendering a question costs about as much as encoding this many characters."""


async def decide(
    requests: TenantRequests,
    context: EngineContext,
    questions: Sequence[Question],
    max_tokens: int | None = None,
) -> Decided:
    """Scores the answers to all questions together. Each question follows the context by itself, and makes a
    prompt of at most ``max_tokens`` with it (None: as many as the model takes)."""
    lengths = [len(question_text(question)) for question in questions]
    async with requests.admitted(context, sum(lengths)) as admitted:
        await requests.encode(context)
        requests.limits.check_length(max(lengths))  # each is a separate prompt
        per_question = CHARS_PER_QUESTION + RENDERINGS * CHARS_PER_TURN * context.num_turns
        amount = sum(lengths) + per_question * len(questions)
        end_ids = requests.client.info.end_token_ids
        asked = await requests.run_off_loop(amount, encode_questions, context.tokens, questions, end_ids)
        if max_tokens is not None:
            most = requests.limits.max_tokens(max_tokens)
            requests.limits.check_num_tokens(len(asked.prompt) + max(map(len, asked.heads)), most)
        requests.begin(admitted, asked.num_tokens, context)
        probabilities, end = await _probabilities(requests.client, asked, context.origin_now())
        usage = Usage(asked.num_tokens, end.cached_tokens)
        requests.done(admitted, usage)
    num_own = min(len(asked.prompt), context.tokens.num_settled)  # the rest belongs to the questions
    context.tokens.num_computed = max(context.tokens.num_computed, num_own)
    return Decided(tuple(probabilities), usage)


@dataclass(frozen=True, slots=True)
class EncodedQuestions:
    """Questions after a state. ``prompt``: the ids that all of them share. ``heads``: the rest of each
    question. ``answers``: the ids of its answers after that."""

    prompt: list[int]
    heads: list[list[int]]
    answers: list[list[list[int]]]

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompt, the questions and the answers."""
        num_answered = sum([len(ids) for answers in self.answers for ids in answers])
        return len(self.prompt) + sum(map(len, self.heads)) + num_answered

    def num_nodes(self, index: int) -> int:
        """About the nodes of a question in a tree."""
        return len(self.heads[index]) + sum([len(ids) - 1 for ids in self.answers[index]])

    def fits_tree(self, index: int) -> bool:
        """Whether the question and each answer are short enough for a tree."""
        return len(self.heads[index]) + max(map(len, self.answers[index])) <= MAX_TREE_TOKENS


def encode_questions(
    tokens: TokenState, questions: Sequence[Question], end_ids: Sequence[int]
) -> EncodedQuestions:
    """Encodes the questions after a state, which is cut as by a fork. ``end_ids``: the model's end tokens.
    ``BadArgument`` within the assistant's turn."""
    first: list[int] = []  # the ids before the answers to the first question
    heads: list[tuple[int, list[int]]] = []  # how many of these each question has, and its ids after them
    answers: list[list[list[int]]] = []
    end: list[int] | None = None
    for question in questions:
        asked, is_plain = _asked(tokens, question_text(question))
        texts = [f" {text}\n" for text in question.answers] if is_plain else question.answers
        encoded = asked.encode_choices(texts)
        if end is None:
            end = [] if is_plain else end_of_turn(asked, end_ids)
        first = encoded.prefix if not heads else first
        num_same = common_prefix(first, encoded.prefix)
        heads.append((num_same, encoded.prefix[num_same:]))
        answers.append([ids + end for ids in encoded.ends])
    num_common = min([num_same for num_same, _ in heads])
    rests = [first[num_common:num_same] + ids for num_same, ids in heads]
    return EncodedQuestions(first[:num_common], rests, answers)


def _asked(tokens: TokenState, question: str) -> tuple[TokenState, bool]:
    """A state with a question after ``tokens``, before its answer; and whether it has no turns."""
    asked = tokens.fork()
    role, is_open = asked.last_turn
    if role == "assistant" and is_open:
        raise BadArgument("decide: the assistant's turn is open: end it first, or decide before it")
    if asked.continues and not asked.messages():
        asked.text(f"\n\n{question}\nAnswer:")
        return asked, True
    if role == "user" and not is_open:  # many templates refuse two turns of the user in a row
        asked.reopen()
    if role == "user":
        asked.text(f"\n\n{question}")
    else:
        if is_open:
            asked.end_role()
        asked.begin_role("user")
        asked.text(question)
    asked.end_role()
    asked.begin_role("assistant")
    return asked, False


async def _probabilities(
    client: EngineClient, asked: EncodedQuestions, origin: Origin
) -> tuple[list[tuple[float, ...]], Finished]:
    """Returns the probabilities of the answers to each question, and the end of the request that computed the
    prompt, which has this origin."""
    found: list[tuple[float, ...]] = [()] * len(asked.heads)
    groups, long = _grouped(asked, min(MAX_NODES, max(1, client.info.num_slots - len(asked.prompt)) // 2))

    def store(index: int, logprobs: Sequence[Sequence[float]]) -> None:
        found[index] = compute_probabilities([sum(values) for values in logprobs])

    async def score(group: Sequence[int], origin: Origin) -> Finished:
        end = await client.score_choices(
            asked.prompt,
            [ids for index in group for ids in asked.answers[index]],
            heads=[asked.heads[index] for index in group],
            head_of=[place for place, index in enumerate(group) for _ in asked.answers[index]],
            origin=origin,
        )
        logprobs = iter(end.choice_logprobs)
        for index in group:
            store(index, [next(logprobs) for _ in asked.answers[index]])
        return end

    async def score_others() -> None:
        # One after the other: the steps of a lone request may take longer, and longer ones are more
        # efficient.
        for group in groups[1:]:
            await score(group, extra_origin(origin))

    async def score_long(index: int) -> None:
        async with limiter:
            prompt = asked.prompt + asked.heads[index]
            store(index, await scoring.scored_after(prompt, asked.answers[index]))

    scoring, limiter = Scoring(client, origin), anyio.CapacityLimiter(MAX_AT_ONCE)
    first = await (score(groups[0], origin) if groups else client.compute(asked.prompt, origin=origin))
    try:
        async with open_task_group() as tasks:
            tasks.start_soon(score_others)
            for index in long:
                tasks.start_soon(score_long, index)
    except ExceptionGroup as failed:  # several, perhaps for the same reason
        raise first_error(failed) from failed
    return found, first


def _grouped(asked: EncodedQuestions, most: int) -> tuple[list[list[int]], list[int]]:
    """The questions of each tree, and those that are too long for one. ``most``: the nodes of a tree, unless
    one question has more."""
    groups: list[list[int]] = []
    num_nodes = 0
    long: list[int] = []
    for index in range(len(asked.heads)):
        if not asked.fits_tree(index):
            long.append(index)
            continue
        num_own = asked.num_nodes(index)
        if not groups or num_nodes + num_own > most:
            groups.append([])
            num_nodes = 0
        groups[-1].append(index)
        num_nodes += num_own
    return groups, long
