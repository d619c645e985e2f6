"""What is asked of a model for DSPy, and whole answers: one that ``max_tokens`` cut off within its adapter's
format is brought to its end."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from typing import Any, Final

import agentflow as af
from agentflow.integrations.client import Ended, ModelCall, ModelConnection, Said
from agentflow.protocol.chat import ToolChoice, ToolSpec, read_reply
from dspy_agentflow.answer_format import AnswerFormat, Rest
from dspy_agentflow.programs import CALLS
from dspy_agentflow.telling import Telling

# What an answer that was cut off may take beyond ``max_tokens`` to end as its format wants it, which is
# short: some words for each field that is missing.
MOST_TOKENS_TO_END: Final = 1024
# Of the options, what is about the whole answer only.
_OF_THE_WHOLE: Final = ("min_tokens", "stop", "stop_regex", "ignore_eos")


@dataclass(frozen=True)
class Asked:
    """``sampling``: arguments of ``af.reply``; ``constraint``: the one that says how the answer looks. Where
    that is ``answer_format``'s, the answer can be brought to its end."""

    messages: list[af.Message]
    sampling: dict[str, Any]
    tools: list[ToolSpec] = field(default_factory=list)
    choice: ToolChoice = field(default_factory=ToolChoice)
    constraint: dict[str, Any] = field(default_factory=dict)
    answer_format: AnswerFormat | None = None
    n: int = 1
    cache_salt: str = ""
    is_streamed: bool = False

    def call(self) -> ModelCall:
        """agentflow's. ``BadArgument`` where it makes no sense."""
        begins = af.conversation(self.messages, tools=self.tools, choice=self.choice)
        says = af.reply("answer", **self.sampling, **self.constraint)
        return ModelCall(begins, says, n=self.n, cache_salt=self.cache_salt)

    def rest_of(self, end: Ended) -> Rest | None:
        """What an answer lacks, if it was cut off within its format."""
        if self.answer_format is None or end.finish_reason != "length":
            return None
        reply = read_reply(end.text)
        return None if reply.tool_calls else self.answer_format.rest(reply.text)

    def for_rest(self, rest: Rest) -> Asked:
        """Asks for that. What was said before it is in the cache."""
        said = [af.Message("assistant", rest.kept, generated=True)] if rest.kept else []
        sampling = {name: value for name, value in self.sampling.items() if name not in _OF_THE_WHOLE}
        sampling["max_tokens"] = MOST_TOKENS_TO_END
        return replace(
            self,
            messages=[*self.messages, *said],
            sampling=sampling,
            choice=ToolChoice("none"),
            constraint=rest.constraint,
            n=1,
        )


def ask(connection: ModelConnection, asked: Asked) -> Generator[Said | Ended, None, None]:
    """What the model says, as it comes. Blocks in between; closing this cancels it."""
    program, objective = CALLS.program_of(connection)
    told = Telling(asked.answer_format if asked.is_streamed else None)
    cut: list[tuple[Ended, Rest]] = []
    with closing(connection.ask(asked.call(), program, objective)) as events:
        for event in events:
            if isinstance(event, Ended) and (rest := asked.rest_of(event)) is not None:
                cut.append((event, rest))
            else:
                yield from told.tell(event)
    for end, rest in cut:
        told.go_on(rest)
        with closing(connection.ask(asked.for_rest(rest).call(), program, objective)) as events:
            for event in events:
                yield from told.tell(_following(event, end, rest))


async def aask(connection: ModelConnection, asked: Asked) -> AsyncGenerator[Said | Ended, None]:
    """The same in an event loop."""
    program, objective = CALLS.program_of(connection)
    told = Telling(asked.answer_format if asked.is_streamed else None)
    cut: list[tuple[Ended, Rest]] = []
    async with aclosing(connection.aask(asked.call(), program, objective)) as events:
        async for event in events:
            if isinstance(event, Ended) and (rest := asked.rest_of(event)) is not None:
                cut.append((event, rest))
                continue
            for one in told.tell(event):
                yield one
    for end, rest in cut:
        told.go_on(rest)
        async with aclosing(connection.aask(asked.for_rest(rest).call(), program, objective)) as events:
            async for event in events:
                for one in told.tell(_following(event, end, rest)):
                    yield one


def _following(event: Said | Ended, end: Ended, rest: Rest) -> Said | Ended:
    """Of the rest of an answer: of this answer. It is said to be cut off, as it was."""
    if isinstance(event, Said):
        return Said(end.index, event.piece)
    text = rest.kept + read_reply(event.text).text
    return replace(
        end,
        text=json.dumps([{"text": text}], separators=(",", ":"), ensure_ascii=False),
        usage=end.usage + event.usage,
        logprobs=None if end.logprobs is None else end.logprobs + (event.logprobs or ()),
        top_logprobs=None if end.top_logprobs is None else end.top_logprobs + (event.top_logprobs or ()),
    )
