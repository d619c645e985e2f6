"""A conversation on one state, whose current answer can be stopped without losing what came before.

Each turn is made on a fork of the turns before it, and is where the conversation goes on once it is whole.
A fork is one of token ids: nothing is encoded twice, and all that was said is in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentflow.errors import AgentflowError, Cancelled, NotSupported
from agentflow.language.expressions import assistant, system, user
from agentflow.language.gen import gen
from agentflow.language.run import Run
from agentflow.language.session import Session
from agentflow.language.state import State
from agentflow.runtime.generator import Usage


@dataclass(frozen=True, slots=True)
class Answered:
    """How an answer went. Of one that was stopped, ``usage`` is unknown. ``ttft_s``: until its first text;
    ``took_s``: until its last."""

    text: str
    usage: Usage | None
    finish_reason: str
    ttft_s: float
    took_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Of those after the first; None where there are too few to tell."""
        writing_s = self.took_s - self.ttft_s
        if self.usage is None or self.usage.output_tokens < 2 or writing_s <= 0:
            return None
        return (self.usage.output_tokens - 1) / writing_s


class Conversation:
    """``sampling``: the arguments of each ``gen``. ``NotSupported`` for a model without a chat template.

    >>> conversation = Conversation(flow, system_text="You are a guide in a zoo.", max_tokens=32)
    >>> answered = await conversation.ask("What do elephants eat?", print)
    """

    def __init__(self, flow: Session, *, system_text: str | None = None, **sampling: Any) -> None:
        if not flow.capabilities.roles:
            raise NotSupported(f"{flow.capabilities.model} has no chat template: it holds no conversation")
        self._flow = flow
        self._sampling = sampling
        self._asked: State | None = None
        self._run: Run | None = None
        self.reset(system_text)

    @property
    def system_text(self) -> str | None:
        """What the model was told to be."""
        return self._system_text

    def reset(self, system_text: str | None) -> None:
        """Begins anew."""
        if self._run is not None:
            self._run.close()
        self._state: State = self._flow.state()
        self._run = self._state.run
        self._system_text = system_text
        if system_text is not None:
            self._state.add(system(system_text))

    async def ask(self, question: str, show: Callable[[str], None]) -> Answered:
        """The answer, whose text is also shown as it comes. After an error, or ``stop`` before the first
        text, the conversation is where it was."""
        began_s = time.monotonic()
        first_s: float | None = None
        turn = self._state.copy()
        turn.add(user(question) + assistant(gen("answer", **self._sampling)))
        variable = turn["answer"]
        self._asked = turn
        try:
            async for text in variable:
                first_s = first_s or time.monotonic()
                show(text)
            await turn
        except Cancelled:
            self._keep(question, variable.text)
        except AgentflowError:
            turn.cancel()
            raise
        else:
            self._state = turn
        finally:
            self._asked = None
        is_whole = self._state is turn
        ended_s = time.monotonic()
        return Answered(
            text=variable.text,
            usage=variable.usage if is_whole else None,
            finish_reason=variable.finish_reason if is_whole else "stopped",
            ttft_s=(first_s or ended_s) - began_s,
            took_s=ended_s - began_s,
        )

    def check_alive(self) -> None:
        """Raises what ended the session, if it has ended."""
        self._flow.check_alive()

    def stop(self) -> None:
        """Ends the current answer, if there is one; what there is of it stays in the conversation."""
        if self._asked is not None:
            self._asked.cancel()

    def _keep(self, question: str, text: str) -> None:
        if text:
            self._state = self._state.copy()
            self._state.add(user(question) + assistant(text))
