"""A backend that answers from a script, to test programs without a model.

The frontend and the interpreter are the real ones; only the generator is a fake.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import anyio.lowlevel
import msgspec

from agentflow.backends.local import interpreted
from agentflow.errors import BadArgument, NotSupported, ScriptMismatch
from agentflow.language.typed.tags import matches_whole, split_at_tags
from agentflow.protocol.backend import Connection, Deliver, Lost
from agentflow.protocol.chat import Arguments, CallBegun, Conversation, Piece, Reply, ReplyWriter, TextPiece
from agentflow.protocol.constraint import CONSTRAINT_KINDS, Constraint
from agentflow.protocol.events import Capabilities, Stats, Usage
from agentflow.protocol.sampling import MATCHES_NOTHING, SamplingParams, stop_regex_error
from agentflow.runtime.generator import Generated, OnText, Scored, StateHint

Answer: TypeAlias = Any
Script = str | Callable[[str], Answer] | Mapping[str, Answer] | Sequence[Answer]
"""The answers to gens: one text; a function of the prompt's text; a mapping from the end of the prompt to the
answer; or a sequence in the order in which gens run. An answer is a text, a value that is written as JSON, or
(in a conversation) a ``Reply``; an exception is raised."""


@dataclass
class ScriptedContext:
    """A state as text, with turns as ``<role>…</role>``. ``may_call``: its conversation allows tool calls."""

    text: str = ""
    open_roles: list[str] = field(default_factory=list)
    may_call: bool = False


class ScriptedGenerator:
    """Answers from a script, one word at a time, with a checkpoint between words. Tokens are words.

    ``max_tokens``, ``min_tokens``, ``stop`` and ``stop_regex`` truncate the answer as they would a model's
    (an answer of fewer words than ``min_tokens`` stays as it is). Parameters of sampling are ignored:
    ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``seed``, the penalties and ``logit_bias``; so are
    ``stop_token_ids`` and ``ignore_eos``, because words have no ids. Log-probabilities are ``NotSupported``.
    """

    def __init__(self, script: Script) -> None:
        self.capabilities = Capabilities(
            model="scripted",
            logprobs=False,
            constraints=CONSTRAINT_KINDS,
            images=True,
            token_ids=False,
            conversations=True,
        )
        self.num_open = 0
        self.num_running = 0
        self._script: Script = (script,) if isinstance(script, str) else script
        self._next_answer = 0
        self._stats = {"steps": 0, "prompt_tokens": 0, "generated_tokens": 0}

    def open(self, cache_salt: str, *, program: str = "") -> ScriptedContext:
        """An empty text."""
        self.num_open += 1
        return ScriptedContext()

    def fill(self, context: ScriptedContext, text: str) -> None:
        """Appends text."""
        context.text += text

    def begin_role(self, context: ScriptedContext, role: str) -> None:
        """Writes ``<role>``."""
        context.open_roles.append(role)
        context.text += f"<{role}>"

    def end_role(self, context: ScriptedContext) -> None:
        """Writes ``</role>``."""
        if not context.open_roles:
            raise BadArgument("there is no open turn to end")
        context.text += f"</{context.open_roles.pop()}>"

    def image(self, context: ScriptedContext, source: str) -> None:
        """Writes ``<image>``."""
        context.text += "<image>"

    async def generate(
        self,
        context: ScriptedContext,
        params: SamplingParams,
        on_text: OnText,
        constraint: Constraint | None = None,
    ) -> Generated:
        """The script's answer, truncated by the parameters. ``ScriptMismatch`` if the answer before
        ``max_tokens`` violates the constraint (of a schema, only that it is JSON is checked; of a grammar,
        nothing)."""
        return await self._stream(context, self._answer(context.text), params, on_text, constraint)

    async def converse(self, context: ScriptedContext, conversation: Conversation) -> None:
        """Writes the turns, and ``<assistant>``."""
        messages = conversation.messages
        context.may_call = bool(conversation.tools) and conversation.choice.mode != "none"
        for number, message in enumerate(messages):
            self.begin_role(context, message.role)
            context.text += message.content
            calls = [f"<call {call.name}>{call.arguments}</call>" for call in message.tool_calls]
            context.text += "".join(calls)
            if message.role != "assistant" or number < len(messages) - 1:
                self.end_role(context)
        if not context.open_roles:
            self.begin_role(context, "assistant")

    async def reply(
        self,
        context: ScriptedContext,
        params: SamplingParams,
        on_text: OnText,
        constraint: Constraint | None = None,
    ) -> Generated:
        """As ``generate``, but the script may also answer with a ``Reply``."""
        answer = self._scripted(context.text)
        writer = ReplyWriter()
        written: list[str] = []

        def write(*pieces: Piece) -> None:
            written.append(writer.push(pieces))
            on_text(written[-1])

        reply = answer if isinstance(answer, Reply) else Reply(_text_of(answer))
        if context.may_call and reply.tool_calls:
            constraint = None  # it applies to replies without calls
        end = await self._stream(
            context, reply.text, params, lambda delta: write(TextPiece(delta)), constraint
        )
        for call in reply.tool_calls:
            context.text += f"<call {call.name}>{call.arguments}</call>"
            write(CallBegun(call.id, call.name), Arguments(call.arguments))
        return msgspec.structs.replace(end, text="".join(written) + writer.finish())

    async def _stream(
        self,
        context: ScriptedContext,
        answer: str,
        params: SamplingParams,
        on_text: OnText,
        constraint: Constraint | None,
    ) -> Generated:
        if params.wants_logprobs:
            raise NotSupported("a scripted backend has no log-probabilities: use an engine")
        prompt = context.text
        answer, reason = _stopped(answer, params)
        if constraint is not None:
            _check_satisfied(constraint, answer)
        words = answer.split(" ")
        if len(words) > params.max_tokens:
            answer, reason = " ".join(words[: params.max_tokens]), "length"
        self.num_running += 1
        try:
            for index, piece in enumerate(answer.split(" ")):
                await anyio.lowlevel.checkpoint()
                delta = f" {piece}" if index else piece
                context.text += delta
                on_text(delta)
        finally:
            self.num_running -= 1
        usage = Usage(len(prompt.split()), 0, len(answer.split()))
        self._count(usage)
        return Generated(answer, reason, usage)

    async def score(self, context: ScriptedContext, choices: Sequence[str], method: str) -> Scored:
        """The choice that equals the script's answer. ``ScriptMismatch`` if there is none."""
        await anyio.lowlevel.checkpoint()
        answer = self._answer(context.text)
        if answer not in choices:
            raise ScriptMismatch(
                f"the script answers {answer!r}, which is none of the choices {list(choices)}"
            )
        usage = Usage(len(context.text.split()), 0, 0)
        self._count(usage)
        context.text += answer
        scores = tuple(0.0 if choice == answer else -10.0 for choice in choices)
        return Scored(choices.index(answer), scores, usage)

    async def fork(self, context: ScriptedContext, count: int) -> list[ScriptedContext]:
        """Copies of the text."""
        self.num_open += count
        return [replace(context, open_roles=list(context.open_roles)) for _ in range(count)]

    def hint(self, context: ScriptedContext, hint: StateHint) -> None:
        """Ignored."""

    def text(self, context: ScriptedContext) -> str:
        """The text, with turns as ``<role>…</role>``."""
        return context.text

    async def token_ids(self, context: ScriptedContext) -> list[int]:
        """``NotSupported``."""
        raise NotSupported("a script has no token ids")

    def free(self, context: ScriptedContext) -> None:
        """Counts the context as closed."""
        self.num_open -= 1

    async def stats(self) -> Stats:
        """Counters, in words."""
        return Stats(model="scripted", **self._stats)

    def _answer(self, prompt: str) -> str:
        return _text_of(self._scripted(prompt))

    def _scripted(self, prompt: str) -> object:
        script = self._script
        answer: Answer
        if callable(script):
            answer = script(prompt)
        elif isinstance(script, Mapping):
            ends = [end for end in script if prompt.endswith(end)]
            if not ends:
                raise ScriptMismatch(f"the script has no answer for a prompt that ends in {prompt[-60:]!r}")
            answer = script[max(ends, key=len)]
        else:
            if self._next_answer >= len(script):
                raise ScriptMismatch(f"the script has only {len(script)} answers")
            answer = script[self._next_answer]
            self._next_answer += 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _count(self, usage: Usage) -> None:
        self._stats["steps"] += 1
        self._stats["prompt_tokens"] += usage.prompt_tokens
        self._stats["generated_tokens"] += usage.output_tokens


def _stopped(answer: str, params: SamplingParams) -> tuple[str, str]:
    if params.stop or params.stop_regex is not None:
        end = _stop_in(answer, params, len(" ".join(answer.split(" ")[: params.min_tokens])))
        if end is not None:
            return answer[:end], "stop"
    return answer, "eos"


def _check_satisfied(constraint: Constraint, answer: str) -> None:
    try:
        is_satisfied = _is_satisfied(constraint, answer)
    except BadArgument:  # a ValueError, too: the constraint itself is invalid
        raise
    except (ValueError, RecursionError):
        is_satisfied = False
    if not is_satisfied:
        raise ScriptMismatch(
            f"the script answers {answer!r}, which violates the {constraint.kind} constraint"
        )


def _is_satisfied(constraint: Constraint, answer: str) -> bool:
    match constraint.kind:
        case "choices":
            return answer in constraint.choices
        case "regex":
            return matches_whole(constraint.source, answer)
        case "schema":
            json.loads(answer)
        case "tags":
            split_at_tags(answer, constraint.tags())
        case "grammar":
            pass
    return True


def _text_of(answer: object) -> str:
    return answer if isinstance(answer, str) else _written(answer)


def _written(value: object) -> str:
    """A value as JSON, with the compact white space of a schema."""
    try:
        dump = getattr(value, "model_dump", None)  # pydantic, which need not be installed
        return json.dumps(
            msgspec.to_builtins(value) if dump is None else dump(mode="json"), ensure_ascii=False
        )
    except (TypeError, ValueError) as error:
        raise BadArgument(
            f"the script answers {value!r}: an answer must be a text, a value that JSON can represent, or an "
            f"exception ({error})"
        ) from None


def _stop_in(answer: str, params: SamplingParams, first: int) -> int | None:
    """The start of the stop that is complete first, of those that begin at ``first`` or later."""
    pattern = None if params.stop_regex is None else re.compile(params.stop_regex)
    if pattern is not None and pattern.match(""):
        raise stop_regex_error(MATCHES_NOTHING, pattern.pattern)
    for end in range(first + 1, len(answer) + 1):
        begins = [end - len(stop) for stop in params.stop if answer.endswith(stop, first, end)]
        found = None if pattern is None else pattern.search(answer, first, end)
        if found is not None:
            begins.append(found.start())
        if begins:
            return min(begins)
    return None


class Scripted:
    """A backend to test programs without a model: it answers from a script. An answer that violates the
    constraint or the choices of its op raises ``ScriptMismatch``.

    ``script``: answers in the order in which gens run; or a mapping from the end of a prompt to its answer
    (the longest match counts); or a function of the prompt. Turns are written ``<user>…</user>`` in the
    prompt. An answer is a text; or a value (a dataclass, a pydantic model, a dict, a list, a number), which
    is written as JSON; or an exception, which is raised.

    >>> script = {"": "Clear.", "Grade it.</user><assistant>": "B"}
    >>> async with af.session(backend=af.Scripted(script)) as flow:
    ...     print(await flow.run(judge, essay))
    B
    """

    def __init__(self, script: Script) -> None:
        self.generator = ScriptedGenerator(script)

    def connect(self, deliver: Deliver, lost: Lost) -> AbstractAsyncContextManager[Connection]:
        """Opens the backend. For the session."""
        return interpreted(self.generator, deliver)
