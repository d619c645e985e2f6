"""Speculative execution: one call for several generations of a turn (Zheng et al., "SGLang", 2024,
section 5).

Most APIs cannot continue a turn of the assistant, and each call sends the whole prompt. Where a program has
appended several gens to one turn, with fixed text between them, the first call ignores its stops and goes on.
The text after them is kept (``Ahead``). The program's fixed text is compared with it, to the character, and
later gens take theirs from it, for as long as the two agree.

The first value has the distribution that it has without speculation. A later value is the model's
continuation of the text before it, so at temperature 0 it is the same as well, if the model is
deterministic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import anyio
import msgspec

from agentflow.backends.apis.answers.answer import AnswerCollector
from agentflow.errors import AgentflowError, NotSupported
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import Upcoming, UpcomingGen
from agentflow.runtime.payer import PAYER

CHARS_PER_TOKEN = 3
"""To estimate the tokens of fixed text, which the model writes too."""


class Ahead:
    """The text of one call, which several generations take. The contexts that share it count as its users.

    Args:
        before: The beginning of the turn that was part of the prompt.
        params: The parameters of the generation that made the call.
        model: The generator that made the call.
    """

    def __init__(self, before: str, params: GenParams, model: object = None) -> None:
        self.model = model
        self.text = before
        self.params = params
        self.reasoning = ""
        self.answer: AnswerCollector | None = None  # complete
        self.error: AgentflowError | None = None
        self.num_users = 1
        self.num_served = 0
        self.scope = anyio.CancelScope()
        self._payer = PAYER.get()
        self._ends: list[int] = [len(before)]  # where the deltas end
        self._charged = Usage()
        self._changed = anyio.Event()

    @property
    def is_greedy(self) -> bool:
        """Whether forks may take the same text: at a higher temperature it would be one draw where the
        program asks for several."""
        return self.params.temperature == 0

    def is_sampled_as(self, params: GenParams) -> bool:
        """Whether a generation with ``params`` samples its tokens as the call does."""
        return _of_tokens(params) == _of_tokens(self.params)

    @property
    def is_over(self) -> bool:
        """Whether no more text comes."""
        return self.answer is not None or self.error is not None

    @property
    def has_ended(self) -> bool:
        """Whether the model has ended the text."""
        return self.answer is not None and self.answer.finish_reason == "eos"

    def extend(self, delta: str) -> None:
        """More text."""
        self.text += delta
        self._ends.append(len(self.text))
        self._wake()

    def extend_reasoning(self, delta: str) -> None:
        """More reasoning, which precedes the text."""
        self.reasoning += delta
        self._wake()

    def finish(self, answer: AnswerCollector) -> None:
        """The answer is complete."""
        self.answer = answer
        self._wake()

    def fail(self, error: AgentflowError) -> None:
        """The call failed."""
        self.error = error
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def change(self) -> None:
        """Waits for more text, or the end."""
        await self._changed.wait()

    async def agrees(self, turn: str) -> bool:
        """Whether the text begins with ``turn``, the turn so far. Waits for as much text as it takes."""
        while len(self.text) < len(turn) and not self.is_over and turn.startswith(self.text):
            await self.change()
        return self.text.startswith(turn)

    async def is_used_up(self, start: int) -> bool:
        """Whether there is no text from character ``start`` on. Waits for the next piece."""
        while len(self.text) <= start and not self.is_over:
            await self.change()
        return len(self.text) <= start

    async def read(self, start: int, max_tokens: int | None, answer: AnswerCollector) -> tuple[str, int]:
        """Writes the text from character ``start`` on into ``answer``, up to a stop.

        Returns:
            Why it ended (``stop``, ``length`` or ``eos``; "" if the call failed), and the number of tokens:
            of pieces, of which each is at least one.
        """
        num_tokens, at, num_thought = 0, start, 0
        while True:
            if num_thought < len(self.reasoning) and not self.num_served:
                answer.add_reasoning(self.reasoning[num_thought:])
                num_thought = len(self.reasoning)
            for piece in self.deltas(at):
                at += len(piece)
                num_tokens += 1
                answer.add_text(piece)
                if answer.is_stopped:
                    return "stop", num_tokens
                if max_tokens is not None and num_tokens >= max_tokens:
                    return "length", num_tokens
            if self.is_over:
                return "" if self.answer is None else self.answer.finish_reason, num_tokens
            await self.change()

    def deltas(self, start: int) -> list[str]:
        """The pieces of the text from character ``start`` on, as they came: at least one token each."""
        ends = [start, *self._ends[bisect_right(self._ends, start) :]]
        return [self.text[first:end] for first, end in pairwise(ends)]

    def leave(self, num_read: int) -> None:
        """The call is over and has no users any more: its payer counts the tokens that no value was charged.

        Args:
            num_read: The estimated tokens of the prompt, for a call that was cancelled.
        """
        usage = Usage(num_read, 0, len(self._ends) - 1) if self.answer is None else self.answer.usage
        if self._payer is not None:
            self._payer.waste(usage - self._charged)
        self._charged = usage

    def charge(self, num_tokens: int) -> Usage:
        """The usage of the next value, of ``num_tokens`` tokens: once the call's is known, all that was not
        charged to others."""
        usage = Usage(output_tokens=num_tokens)
        if self.answer is not None:
            usage = self.answer.usage - self._charged
        self._charged += usage
        self.num_served += 1
        return usage


def disagreement(model: str, turn: str, written: str) -> NotSupported:
    """The error of a model that cannot continue its turn, and has written another one."""
    return NotSupported(
        f"{model} cannot continue a turn that it has begun, and the text that it writes ({written[:200]!r}) "
        f"does not begin with the turn so far ({turn[-200:]!r}): put each gen into its own af.assistant(…)"
    )


def _of_tokens(params: GenParams) -> GenParams:
    """The parameters by which tokens are sampled."""
    return msgspec.structs.replace(
        params,
        max_tokens=None,
        min_tokens=None,
        stop=(),
        stop_regex=None,
        seed=None,
        max_reasoning_tokens=None,
        stream_reasoning=False,
    )


def sampled_otherwise(model: str) -> NotSupported:
    """The error of a gen whose parameters differ from the first gen's in its turn."""
    return NotSupported(
        f"{model} cannot continue a turn that it has begun, so the gens of one turn have the same sampling "
        "parameters: put this gen into a separate af.assistant(…)"
    )


def is_useful(turn: str, upcoming: Sequence[Upcoming], params: GenParams, *, continues: bool) -> bool:
    """Whether a call should go on after its generation.

    Args:
        turn: The assistant's turn so far.
        upcoming: The text and the gens that follow in the turn.
        params: The parameters of the generation.
        continues: Whether the API can continue the turn.
    """
    has_stop = bool(params.stop or params.stop_regex)
    has_gens = has_stop and any(isinstance(item, UpcomingGen) for item in upcoming)
    return has_gens or (bool(turn) and not continues)


def call_params(turn: str, upcoming: Sequence[Upcoming], params: GenParams) -> GenParams:
    """The parameters of the call: without the stops, and with the tokens of all gens that it may answer.
    ``turn``: the part of the turn that the model writes too."""
    limits = [params.max_tokens]
    num_chars = len(turn)
    for item in upcoming:
        if isinstance(item, str):
            num_chars += len(item)
        else:
            limits.append(item.params.max_tokens)
    known = [limit for limit in limits if limit is not None]
    most = sum(known) + -(-num_chars // CHARS_PER_TOKEN) if len(known) == len(limits) else None
    return msgspec.structs.replace(params, stop=(), stop_regex=None, max_tokens=most, min_tokens=None)
