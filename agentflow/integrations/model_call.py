"""Calls of a model from outside of any program, as other frameworks make them: a conversation, or a text, and
the answers to it as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from agentflow.errors import AgentflowError, RunFailed
from agentflow.language.expressions import ConversationExpression, GenExpression
from agentflow.language.session import Session
from agentflow.language.state import State
from agentflow.language.stream import TextDelta
from agentflow.language.variable import Variable
from agentflow.protocol.ops import Objective
from agentflow.protocol.reply import Piece, ReplyReader, TextPiece
from agentflow.protocol.token_logprob import TopLogprobs
from agentflow.runtime.generator import Usage

# So many calls of a program keep what they have computed from being dropped first.
MOST_KEPT = 4


@dataclass(frozen=True, slots=True)
class ModelCall:
    """``begins``: what the state begins with. ``says``: what the model says then, a ``reply`` or a ``gen``;
    ``n`` times, each by itself."""

    begins: ConversationExpression | str
    says: GenExpression[Any]
    n: int = 1
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """Answer ``index`` goes on."""

    index: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Ended:
    """Answer ``index`` is complete. ``model``: whose it is. The rest is as ``Variable`` has it."""

    index: int
    model: str
    finish_reason: str
    usage: Usage
    text: str
    """As its value has it: of a reply, a JSON list."""
    logprobs: tuple[float | None, ...] | None
    top_logprobs: TopLogprobs | None


class CalledProgram:
    """Calls that belong together, as one program's: what the last of them computed is kept for the next ones,
    and the scheduler finishes them before it begins another's. Ends with ``close``."""

    def __init__(self, session: Session, name: str = "", objective: Objective | None = None) -> None:
        self.session = session
        self._name = name
        self._objective = objective
        self._kept: deque[State] = deque()
        self._is_closed = False

    async def ask(self, call: ModelCall) -> AsyncGenerator[Said | Ended, None]:
        """What the model says, as it comes. Closing this cancels the call. Raises why it failed."""
        root = self.session.state(cache_salt=call.cache_salt, objective=self._objective, program=self._name)
        is_whole = False
        try:
            async for event in _events(root, call):
                yield event
            is_whole = True
        except RunFailed as error:
            # That nothing was generated, and why: only the latter is of use to who knows of no states.
            raise error.__cause__ if isinstance(error.__cause__, AgentflowError) else error from None
        finally:
            if not is_whole:
                root.cancel()
            self._keep(root)

    def close(self) -> None:
        """Nothing more is asked: what was kept may go."""
        self._is_closed = True
        while self._kept:
            self._kept.popleft().run.close()

    def _keep(self, root: State) -> None:
        self._kept.append(root)
        while self._kept and (self._is_closed or not self._name or len(self._kept) > MOST_KEPT):
            self._kept.popleft().run.close()


async def _events(root: State, call: ModelCall) -> AsyncGenerator[Said | Ended, None]:
    root.add(call.begins)
    states = [root] if call.n == 1 else list(root.fork(call.n))
    variables = [state.add(call.says)[call.says] for state in states]
    readers = [ReplyReader() if call.says.value_type.is_reply else None for _ in states]
    async for event in root.run.watch(lambda: all(variable.is_done for variable in variables), as_sent=True):
        index = event.path[-1] if event.path else 0
        if not isinstance(event, TextDelta):
            yield _ended(root.session.capabilities.model, index, variables[index])
            continue
        reader = readers[index]
        pieces = [TextPiece(event.text)] if reader is None else reader.push(event.text)
        for piece in pieces:
            yield Said(index, piece)
    for variable in variables:
        variable.raise_failure()


def _ended(model: str, index: int, variable: Variable[Any]) -> Ended:
    return Ended(
        index,
        model,
        variable.finish_reason,
        variable.usage,
        variable.notation,
        variable.logprobs,
        variable.top_logprobs,
    )
