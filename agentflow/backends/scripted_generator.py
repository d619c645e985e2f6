"""The generator of a script: a fake model that answers gens with the answers of the script.

An answer is chosen when the program appends the gen, not when the gen runs: branches run in any order, and a
test must give each of them the same answer every time.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeAlias

import anyio.lowlevel
import msgspec

from agentflow.backends.scripted_answers import (
    ScriptedAnswer,
    check_satisfied,
    for_name,
    make_reply,
    make_text,
    scripted_probabilities,
    stopped,
)
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    NotSupported,
    ScriptMismatch,
    short_repr,
    shown_error,
)
from agentflow.language.failures.stack_frames import raised_at
from agentflow.language.failures.user_code import UserCode
from agentflow.language.typed.replies import Message, make_calls, make_message
from agentflow.language.typed.tools import ToolCall
from agentflow.protocol.chat import (
    Arguments,
    CallBegun,
    Conversation,
    ReplyPiece,
    ReplyWriter,
    TextPiece,
    ToolChoice,
    ToolSpec,
)
from agentflow.protocol.constraint import CONSTRAINT_KINDS, Constraint
from agentflow.protocol.decisions import Question
from agentflow.protocol.events import Capabilities, Stats, Usage
from agentflow.protocol.images import Image, Medium, Video, medium_kind, placed_in
from agentflow.protocol.sampling import GenParams, SamplingParams
from agentflow.runtime.generator import (
    METER,
    Decided,
    EmbeddingOptions,
    Embeddings,
    Generated,
    OnText,
    Scored,
    StateHint,
)
from agentflow.runtime.word_embedding import word_embedding

MAX_CALLS = 10_000
"""The most calls that are kept."""


class ScriptedCall(str):
    """One generation of an ``af.Scripted``: a string, the text of its prompt, with the arguments of the gen.

    Attributes:
        name: The name of the variable.
        kind: ``gen``, ``reply``, ``select`` or ``decide``.
        messages: The turns of the prompt, as ``s.messages()`` gives them, with the open one if it has text.
        tools: The tools of the conversation.
        params: The sampling parameters of a gen or a reply, as they were sent.
        constraint: The constraint of a gen or a reply, as it was sent.
        choices: The choices of a select.
        questions: The questions of a decide.
        answer: The script's answer, before stops and limits truncated it; None until then.

    >>> backend = af.Scripted(lambda call: f"{call.name}, {call.params.max_tokens} tokens")
    >>> async with af.session(backend=backend) as flow, flow.state() as s:
    ...     s += af.user("Say something.") + af.assistant(af.gen("answer", max_tokens=9))
    ...     print(await s["answer"])
    answer, 9 tokens
    >>> backend.calls[0].messages
    [{'role': 'user', 'content': 'Say something.'}]
    """

    name: str
    kind: Literal["gen", "reply", "select", "decide"]
    sent: _SentGen
    messages: list[dict[str, Any]]
    tools: tuple[ToolSpec, ...]
    params: SamplingParams
    constraint: Constraint | None
    choices: tuple[str, ...]
    questions: tuple[Question, ...]
    answer: Any

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name!r} after {str(self)!r}: {self.answer!r}>"


Script = (
    str | Callable[[ScriptedCall], ScriptedAnswer] | Mapping[str, ScriptedAnswer] | Sequence[ScriptedAnswer]
)
"""See ``Scripted``."""


@dataclass(frozen=True, slots=True)
class _SentGen:
    """A gen or select that the program has appended. ``number``: in the order of the appends, from 0.
    ``ordinal``: the same among gens of its name."""

    name: str
    number: int
    ordinal: int


GenQueue: TypeAlias = "deque[_SentGen | list[GenQueue]]"
"""The gens, selects and forks of a state that have not run yet, in order; a fork is the list of its branches'
queues. A state runs its ops in order and stops at the first that fails, so the first of the queue is the one
that runs."""


@dataclass
class ScriptedContext:
    """A state as text, with turns as ``<role>…</role>``."""

    text: str = ""
    open_roles: list[str] = field(default_factory=list)
    may_call: bool = False  # its conversation allows tool calls
    sent: GenQueue = field(default_factory=deque)  # the ops that were sent and have not run
    tools: tuple[ToolSpec, ...] = ()
    messages: tuple[Message, ...] = ()  # the turns that have ended
    turn_at: int = 0  # where the text of the open turn begins
    calls_at: int | None = None  # where its tool calls begin
    calls: tuple[ToolCall, ...] = ()  # its tool calls
    answered: tuple[str | None, str | None] = (None, None)  # the id of the call that it answers, and the tool
    images: tuple[tuple[int, Medium], ...] = ()  # of the open turn, with their places in its text
    num_calls: int = 0

    def begin(self, role: str, answered: tuple[str | None, str | None] = (None, None)) -> None:
        """Begins a turn. ``answered``: the id of the call that it answers, and the tool."""
        self.open_roles.append(role)
        self.text += f"<{role}>"
        self.turn_at, self.calls_at, self.calls, self.images = len(self.text), None, (), ()
        self.answered = answered

    def end(self) -> None:
        """Ends the open turn."""
        self.messages += (self.open_message(),)
        self.text += f"</{self.open_roles.pop()}>"

    def open_message(self) -> Message:
        """The open turn."""
        written = self.text[self.turn_at : self.calls_at]
        parts: list[str | Medium] = []
        done = 0
        for at, medium in self.images:
            parts += [written[done:at], medium]
            done = at + len(_mark(medium))
        content, images = placed_in([*parts, written[done:]])
        return Message(self.open_roles[-1], content, self.calls, *self.answered, images)

    def show(self, medium: Medium) -> None:
        """Writes ``<image>`` or ``<video>``."""
        self.images += ((len(self.text) - self.turn_at, medium),)
        self.text += _mark(medium)

    def call(self, call: ToolCall) -> None:
        """Writes a tool call."""
        if self.calls_at is None:
            self.calls_at = len(self.text)
        self.calls += (call,)
        self.text += f"<call {call.name}>{call.text}</call>"

    def named(self, call: ToolCall) -> ToolCall:
        """The call with an id."""
        self.num_calls += 1
        return call if call.id else replace(call, id=f"call_{self.num_calls}")

    def forked(self, sent: GenQueue) -> ScriptedContext:
        """A copy, for a branch."""
        return replace(self, open_roles=list(self.open_roles), sent=sent)


def _mark(medium: Medium) -> str:
    return f"<{medium_kind(medium)}>"


EMBEDDING_SIZE = 64
"""Dimensions of the embeddings that a script makes."""


class ScriptedGenerator:
    """Answers from a script, one word at a time, with a checkpoint between words. Tokens are words.

    ``max_tokens``, ``min_tokens``, ``stop`` and ``stop_regex`` truncate the answer as they would a model's
    (an answer of fewer words than ``min_tokens`` is unchanged). Parameters of sampling are ignored:
    ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``seed``, the penalties and ``logit_bias``; so are
    ``stop_token_ids`` and ``ignore_eos``, because words have no ids. Log-probabilities are ``NotSupported``.
    """

    def __init__(self, script: Script) -> None:
        if not isinstance(script, Mapping | Sequence) and not _is_function(script):
            raise BadArgument(
                f"Scripted: {short_repr(script)} is no script: give a dict from the names of variables to "
                "their answers, a list of answers, or a function",
                param="script",
            )
        self.capabilities = Capabilities(
            model="scripted",
            logprobs=False,
            constraints=CONSTRAINT_KINDS,
            images=True,
            videos=True,
            token_ids=False,
            conversations=True,
            embedding_models=("scripted",),
            default_max_tokens=SamplingParams().max_tokens,
        )
        self.num_open = 0
        self.num_running = 0
        self.calls: dict[int, ScriptedCall] = {}
        self._script: Script = (script,) if isinstance(script, str) else script
        self._num_sent: Counter[str] = Counter()
        self._opening: GenQueue | None = None
        self._stats: dict[str, Any] = {"steps": 0, "prompt_tokens": 0, "generated_tokens": 0}

    def open(self, cache_salt: str, *, program: str = "", label: str = "") -> ScriptedContext:
        """An empty text."""
        self.num_open += 1
        queue, self._opening = self._opening, None
        return ScriptedContext(sent=deque() if queue is None else queue)

    def fill(self, context: ScriptedContext, text: str) -> None:
        """Appends text."""
        context.text += text

    def begin_role(
        self, context: ScriptedContext, role: str, tool_call_id: str | None = None, name: str | None = None
    ) -> None:
        """Writes ``<role>``."""
        context.begin(role, (tool_call_id, name))

    def end_role(self, context: ScriptedContext) -> None:
        """Writes ``</role>``."""
        if not context.open_roles:
            raise BadArgument("there is no open turn to end")
        context.end()

    def image(self, context: ScriptedContext, image: Image) -> None:
        """Writes ``<image>``."""
        context.show(image)

    def video(self, context: ScriptedContext, video: Video) -> None:
        """Writes ``<video>``."""
        context.show(video)

    async def generate(
        self,
        context: ScriptedContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        """Returns the script's answer, truncated by the parameters. The arguments are as in
        ``Generator.generate``; a script has no reasoning. ``ScriptMismatch`` if the answer before
        ``max_tokens`` violates the constraint (of a schema, only that it is JSON is checked; of a grammar,
        nothing)."""
        call = self._call(context, "gen", params.resolved(), constraint)
        return await self._stream(
            context, make_text(self._answer(call)), call.name, call.params, on_text, constraint
        )

    async def offer_tools(
        self, context: ScriptedContext, tools: tuple[ToolSpec, ...], choice: ToolChoice
    ) -> None:
        """Writes nothing: the script knows the tools."""
        context.may_call = bool(tools) and choice.mode != "none"
        context.tools = tools

    async def converse(self, context: ScriptedContext, conversation: Conversation) -> None:
        """Writes the turns, and ``<assistant>``."""
        messages = conversation.messages
        await self.offer_tools(context, conversation.tools, conversation.choice)
        for number, message in enumerate(messages):
            context.begin(message.role)
            for part in message.parts:
                if not isinstance(part, str):
                    context.show(part)
                else:
                    context.text += part
            for call in make_calls(message.tool_calls):
                context.call(call)
            if message.role != "assistant" or number < len(messages) - 1:
                context.end()
                context.messages = (*context.messages[:-1], make_message(message))
        if not context.open_roles:
            context.begin("assistant")

    async def reply(
        self,
        context: ScriptedContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        """Like ``generate``, but the script may also answer with a ``Reply`` or with tool calls."""
        call = self._call(context, "reply", params.resolved(), constraint)
        reply = make_reply(self._answer(call))
        writer = ReplyWriter()
        written: list[str] = []

        def write(*pieces: ReplyPiece) -> None:
            written.append(writer.push(pieces))
            on_text(written[-1])

        if context.may_call and reply.tool_calls:
            constraint = None  # it applies to replies without calls
        end = await self._stream(
            context, reply.text, call.name, call.params, lambda delta: write(TextPiece(delta)), constraint
        )
        for answered in reply.tool_calls:
            called = context.named(answered)
            context.call(called)
            write(CallBegun(called.id, called.name), Arguments(called.text))
        return msgspec.structs.replace(end, text="".join(written) + writer.finish())

    async def _stream(
        self,
        context: ScriptedContext,
        answer: str,
        name: str,
        params: SamplingParams,
        on_text: OnText,
        constraint: Constraint | None,
    ) -> Generated:
        if params.wants_logprobs:
            raise NotSupported("a scripted backend has no log-probabilities: use an engine")
        prompt = context.text
        answer, reason = stopped(answer, params)
        if constraint is not None:
            check_satisfied(constraint, answer, name)
        words = answer.split(" ")
        if len(words) > params.max_tokens:
            answer, reason = " ".join(words[: params.max_tokens]), "length"
        self.num_running += 1
        meter = METER.get()
        try:
            for index, piece in enumerate(answer.split(" ")):
                await anyio.lowlevel.checkpoint()
                if meter is not None and piece:
                    meter(1)
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
        call = self._call(context, "select", choices=tuple(choices))
        await anyio.lowlevel.checkpoint()
        answer = make_text(self._answer(call))
        if answer not in choices:
            raise ScriptMismatch(
                f"the script answers {answer!r}{for_name(call.name)}, which is none of the choices "
                f"{list(choices)}"
            )
        usage = Usage(len(context.text.split()), 0, 0)
        self._count(usage)
        context.text += answer
        scores = tuple(0.0 if choice == answer else -10.0 for choice in choices)
        return Scored(choices.index(answer), scores, usage)

    async def decide(self, context: ScriptedContext, questions: Sequence[Question]) -> Decided:
        """The script's answers. ``ScriptMismatch`` if they do not answer the questions."""
        call = self._call(context, "decide", questions=tuple(questions))
        await anyio.lowlevel.checkpoint()
        found = scripted_probabilities(questions, self._answer(call), call.name)
        usage = Usage(len(context.text.split()), 0, 0)
        self._count(usage)
        return Decided(found, usage)

    async def fork(self, context: ScriptedContext, count: int) -> list[ScriptedContext]:
        """Copies of the text."""
        self.num_open += count
        queues = context.sent.popleft() if context.sent else [deque() for _ in range(count)]
        assert isinstance(queues, list)
        return [context.forked(queue) for queue in queues]

    def hint(self, context: ScriptedContext, hint: StateHint) -> None:
        """Ignored."""

    def text(self, context: ScriptedContext) -> str:
        """The text, with turns as ``<role>…</role>``."""
        return context.text

    async def embed(self, texts: Sequence[str], options: EmbeddingOptions) -> Embeddings:
        """Embeddings of ``EMBEDDING_SIZE`` dimensions (``word_embedding``): texts that have words in common
        are similar. The prompt changes nothing."""
        size = options.dimensions or EMBEDDING_SIZE
        if not 1 <= size <= EMBEDDING_SIZE:
            raise BadArgument(f"dimensions: 1 to {EMBEDDING_SIZE}, not {size}", param="dimensions")
        vectors: list[bytes] = []
        num_words = 0
        for text in texts:
            await anyio.lowlevel.checkpoint()
            words = re.findall(r"\w+", text.lower())
            num_words += len(words)
            vector = word_embedding([word.encode() for word in words], size)
            vectors.append(struct.pack(f"<{size}f", *vector))
        self._stats["prompt_tokens"] += num_words
        return Embeddings(vectors, Usage(prompt_tokens=num_words))

    async def token_texts(self, context: ScriptedContext) -> list[str]:
        """``NotSupported``."""
        raise NotSupported("a script has no tokens")

    async def token_ids(self, context: ScriptedContext) -> list[int]:
        """``NotSupported``."""
        raise NotSupported("a script has no token ids")

    def watching(self) -> NoReturn:
        """``NotSupported``."""
        raise NotSupported("a script has no scheduler and no cache to watch")

    def free(self, context: ScriptedContext) -> None:
        """Counts the context as closed."""
        self.num_open -= 1

    async def stats(self) -> Stats:
        """Counters, in words."""
        return Stats(model="scripted", **self._stats)

    def sent_gen(self, name: str) -> _SentGen:
        """Counts a gen that the program has appended."""
        self._num_sent[name] += 1
        return _SentGen(name, self._num_sent.total() - 1, self._num_sent[name] - 1)

    def will_open(self, queue: GenQueue) -> None:
        """The context that opens now belongs to this queue. It may be refused."""
        self._opening = queue

    def unused(self) -> dict[str, int]:
        """The number of answers that no generation has used, by variable; the answers of a list count under
        "". Functions do not count; a single answer of a variable is used by its first generation."""
        script = self._script
        if isinstance(script, Mapping):
            left = {
                name: (len(answers) if _is_list(answers) else 1) - self._num_sent[name]
                for name, answers in script.items()
            }
        else:
            left = {"": 0 if callable(script) else len(script) - self._num_sent.total()}
        return {name: count for name, count in left.items() if count > 0}

    def _call(
        self,
        context: ScriptedContext,
        kind: Literal["gen", "reply", "select", "decide"],
        params: SamplingParams | None = None,
        constraint: Constraint | None = None,
        choices: tuple[str, ...] = (),
        questions: tuple[Question, ...] = (),
    ) -> ScriptedCall:
        """The next generation of this context."""
        sent = context.sent.popleft() if context.sent else self.sent_gen("")
        assert isinstance(sent, _SentGen)
        call = ScriptedCall(context.text)
        call.name, call.kind, call.sent = sent.name, kind, sent
        turn = [context.open_message()] if context.open_roles else []
        messages = (*context.messages, *[message for message in turn if message.content or message.images])
        call.messages = [message.as_dict() for message in messages]
        call.tools, call.choices, call.questions = context.tools, choices, questions
        call.params, call.constraint = params or SamplingParams(), constraint
        call.answer = None
        self.calls[sent.number] = call
        if len(self.calls) > MAX_CALLS:
            del self.calls[next(iter(self.calls))]
        return call

    def _answer(self, call: ScriptedCall) -> ScriptedAnswer:
        """The script's answer; an exception is raised."""
        call.answer = self._scripted(call)
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def _scripted(self, call: ScriptedCall) -> ScriptedAnswer:
        script: Any = self._script
        position, kept = call.sent.number, "the script"
        if isinstance(script, Mapping):
            if call.name not in script:
                known = ", ".join(map(repr, script)) or "none"
                raise ScriptMismatch(
                    f"the script has no answer for the variable {call.name!r} (it has: {known})"
                )
            kept = f"the script of {call.name!r}"
            script, position = script[call.name], call.sent.ordinal
            if not _is_function(script) and not _is_list(script):
                return script
        if _is_function(script):
            return _called(script, call)
        if position >= len(script):
            raise ScriptMismatch(
                f"there is no answer left{for_name(call.name)}: {kept} has {len(script)}, and this is "
                f"generation {position + 1}"
            )
        return script[position]

    def _count(self, usage: Usage) -> None:
        self._stats["steps"] += 1
        self._stats["prompt_tokens"] += usage.prompt_tokens
        self._stats["generated_tokens"] += usage.output_tokens


def _is_function(script: object) -> bool:
    """Whether it makes answers. A tool call is an answer."""
    return callable(script) and not isinstance(script, ToolCall)


def _is_list(script: object) -> bool:
    """Whether it has several answers. A named tuple is one."""
    return isinstance(script, list | tuple) and not hasattr(script, "_fields")


def _called(script: Callable[[ScriptedCall], ScriptedAnswer], call: ScriptedCall) -> ScriptedAnswer:
    with UserCode("the script's function"):
        try:
            return script(call)
        except AgentflowError:  # scripted, like one that is returned
            raise
        except Exception as error:
            line = raised_at(error)  # None if the function cannot be called with a call alone
            at = "" if line is None else f", at {line}"
            raise ScriptMismatch(
                f"the script's function raised {shown_error(error)}{for_name(call.name)}{at}"
            ) from error
