"""Scores a select's choices on the engine: short ones together as a tree, long ones as prompts.

In a tree, choices share their starts, but each node attends to its whole path, so that nodes of long choices
would make steps long. Choices of more than ``MAX_TREE_TOKENS`` tokens are therefore scored like prompts: in
chunks, with the log-probabilities of their tokens. Long choices with the same start are divided where they
differ: the start is scored once, and the rest afterwards, when the start is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import anyio
import msgspec

from agentflow.engine.client import EngineClient
from agentflow.engine.generator.context import CHARS_PER_TURN, EngineContext
from agentflow.engine.generator.requests import TenantRequests
from agentflow.engine.messages import Finished
from agentflow.engine.request import Origin
from agentflow.engine.text.common_prefix import common_prefix
from agentflow.engine.text.state.choices import EncodedChoices, choices_that_begin_others, compute_scores
from agentflow.engine.text.state.token_state import TokenState
from agentflow.engine.token_tree import check_choice_tokens
from agentflow.errors import BadArgument
from agentflow.runtime.generator import Scored
from agentflow.runtime.task_group import open_task_group

MAX_TREE_TOKENS = 256
"""The most tokens of a choice in a tree."""
MAX_AT_ONCE = 8
"""The most concurrent prompts of one select."""
RENDERINGS = 4
"""How often ``end_of_turn`` renders all turns."""

_Scores = tuple[list[list[float]], Finished]


async def score(
    requests: TenantRequests, context: EngineContext, choices: Sequence[str], method: str
) -> Scored:
    """Scores all choices by ``method``, by the tokens after their common beginning. The chosen one is
    appended with the scored ids. Raises ``BadArgument`` if all choices together are too long."""
    async with requests.admitted(context) as admitted:
        encoded = scored = await requests.encode_choices(context, choices)
        if method == "likelihood":
            amount = len(choices) + RENDERINGS * CHARS_PER_TURN * context.num_turns
            end_ids = requests.client.info.end_token_ids
            scored = await requests.run_off_loop(amount, with_ends, context.tokens, encoded, end_ids)
        requests.begin(admitted, len(scored.prefix) + sum(map(len, scored.ends)), context)
        scores, end = await select_scores(requests.client, context, scored, method)
        requests.done(admitted, end.usage)
    best = max(range(len(scores)), key=scores.__getitem__)
    context.tokens.choose(encoded, best)
    context.mark_encoded()
    context.tokens.num_computed = len(encoded.prefix)
    return Scored(best, tuple(scores), end.usage)


def end_of_turn(tokens: TokenState, end_ids: Sequence[int]) -> list[int]:
    """The token that ends the assistant's turn, if it is an end token of the model. Templates may rewrite the
    beginning of a closed turn, so the token is found after the place where two answers differ."""
    closed: list[list[int]] = []
    for answer in ("yes", "no"):
        answered = tokens.copied()  # a fork would divide the text before the choices from them
        answered.text(answer)
        answered.end_role()
        closed.append(answered.ids()[::-1])
    num_same = common_prefix(*closed)
    return [closed[0][num_same - 1]] if num_same and closed[0][num_same - 1] in end_ids else []


async def select_scores(
    client: EngineClient, context: EngineContext, encoded: EncodedChoices, method: str
) -> tuple[list[float], Finished]:
    """Returns the score of each choice, and the end of the request that computed the prompt."""
    check_choice_tokens(encoded.ends)
    starts = _start_ids(client) if method == "unconditional_likelihood_normalized" else []
    origin = context.origin_now()
    logprobs, end = await Scoring(client, origin).scored(encoded.prefix, encoded.ends, origin)
    unconditional: list[list[float]] = []
    if starts:
        unconditional, _ = await Scoring(client, origin).scored(starts, encoded.ends, extra_origin(origin))
    return compute_scores(method, encoded.ends, logprobs, unconditional), end


def extra_origin(origin: Origin) -> Origin:
    """Returns the origin of the further requests of a select or a decide, of which the first one has the
    client's prompt. They belong to no state: the state's next request will not continue their prompts."""
    return msgspec.structs.replace(origin, state=0, is_extra=True)


def with_ends(tokens: TokenState, encoded: EncodedChoices, end_ids: Sequence[int]) -> EncodedChoices:
    """Returns the choices for ``likelihood``. A choice with which another one begins gets an end token:
    otherwise it would be at least as likely as the longer one. ``end_ids``: the model's end tokens."""
    begun = choices_that_begin_others(encoded.choices)
    if not begun or not end_ids:
        return encoded
    has_turn = tokens.last_turn == ("assistant", True)
    end = (end_of_turn(tokens, end_ids) if has_turn else []) or [end_ids[0]]
    ends = [ids + end if index in begun else ids for index, ids in enumerate(encoded.ends)]
    return replace(encoded, ends=ends)


class Scoring:
    """The requests of one select."""

    def __init__(self, client: EngineClient, origin: Origin) -> None:
        self._client = client
        self._stateless = extra_origin(origin)
        self._limiter = anyio.CapacityLimiter(MAX_AT_ONCE)

    async def scored(self, prompt: list[int], choices: Sequence[list[int]], origin: Origin) -> _Scores:
        """Returns the log-probabilities of each choice's tokens after ``prompt``, and the end of the first
        request, which computes the prompt and has this origin."""
        short: list[int] = []
        by_start: dict[tuple[int, ...], list[int]] = {}
        for index, choice in enumerate(choices):
            is_short = len(choice) <= MAX_TREE_TOKENS
            (short if is_short else by_start.setdefault(tuple(choice[:MAX_TREE_TOKENS]), [])).append(index)
        if short:
            end = await self._client.score_choices(prompt, [choices[n] for n in short], origin=origin)
        else:
            end = await self._client.compute(prompt, origin=origin)
        logprobs: list[list[float]] = [[] for _ in choices]
        for index, values in zip(short, end.choice_logprobs, strict=True):
            logprobs[index] = values

        async def score(members: list[int]) -> None:
            values = await self._as_prompts(prompt, [choices[n] for n in members])
            for index, of_choice in zip(members, values, strict=True):
                logprobs[index] = of_choice

        async with open_task_group() as group:
            for members in by_start.values():
                group.start_soon(score, members)
        return logprobs, end

    async def scored_after(self, prompt: list[int], choices: Sequence[list[int]]) -> list[list[float]]:
        """Returns the log-probabilities of each choice's tokens after a prompt that belongs to no state."""
        return (await self.scored(prompt, choices, self._stateless))[0]

    async def _as_prompts(self, prompt: list[int], choices: Sequence[list[int]]) -> list[list[float]]:
        """Returns the log-probabilities of long choices that begin with the same tokens."""
        num_common = min(common_prefix(choices[0], choice) for choice in choices)
        path = prompt + choices[0][:num_common]
        async with self._limiter:
            end = await self._client.score(path, len(prompt), origin=self._stateless)
        values = [value for value in end.logprobs if value is not None]
        longer = [choice[num_common:] for choice in choices if len(choice) > num_common]
        rest = iter((await self.scored(path, longer, self._stateless))[0] if longer else [])
        return [values + (next(rest) if len(choice) > num_common else []) for choice in choices]


def _start_ids(client: EngineClient) -> list[int]:
    """Returns the token before a text at the start of a sequence. ``BadArgument`` if the model has none."""
    bos, ends = client.tokenizer.bos_id, client.info.end_token_ids
    if bos is None and not ends:
        raise BadArgument(
            "select: this model has no token that begins or ends a text, so it scores no choices without a "
            "prompt: use another method",
            param="method",
        )
    return [ends[0] if bos is None else bos]
