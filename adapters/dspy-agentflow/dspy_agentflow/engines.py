"""``AgentflowLM`` for DSPy 3.4 and later, and its two engines: one that blocks, and one for event loops.

An engine receives a ``dspy.lm15.Request`` and returns a ``Response`` or streams its events. ``asked_of``
converts the request; ``_response_of``, ``_EventWriter`` and ``_engine_errors`` convert answers and errors.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import aclosing, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self

from dspy import lm15
from dspy.clients.base_lm import LM_CLASS_STATE_KEY

import agentflow as af
from agentflow.integrations import Answer, Arguments, CallBegun, Delta, ToolChoice, ToolSpec, read_reply
from dspy_agentflow.answers import Asked, acomplete, astream, complete, stream, tokens_of
from dspy_agentflow.call_notes import CallNotes, notes
from dspy_agentflow.lm import DEFAULT_MAX_TOKENS, BaseAgentflowLM, EngineSettings, is_cache_scope
from dspy_agentflow.programs import register_callback


class AgentflowLM(BaseAgentflowLM):
    __doc__ = BaseAgentflowLM.__doc__

    def _engine_options(self, settings: EngineSettings) -> dict[str, Any]:
        return {"engine": AgentflowEngine(settings), "async_engine": AsyncAgentflowEngine(settings)}

    def _in_scope(self, request: Any) -> Any:
        scope = self._cache_scope()
        if not scope or not isinstance(request, lm15.Request):
            return request
        extensions = {**(request.config.extensions or {}), **scope}
        return replace(request, config=replace(request.config, extensions=extensions))

    def dump_state(self) -> dict[str, Any]:
        """Returns the state to save, without the API key."""
        state: dict[str, Any] = super().dump_state()
        engine = state.pop("engine")
        del state["async_engine"]
        state = {name: value for name, value in state.items() if not is_cache_scope(name)}
        return {**state, **engine["state"], "follow_adapter": self.follow_adapter}

    @classmethod
    def load_state(cls, state: dict[str, Any], *, allow_custom_lm_class: bool = False) -> Self:
        """Returns the LM for a result of ``dump_state``. To load a program with this LM, pass
        ``allow_unsafe_lm_state=True``."""
        return cls(**{name: value for name, value in state.items() if name != LM_CLASS_STATE_KEY})


SUPPORTED_PARAMS: Final = frozenset(
    (
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "response_format",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stream",
    )
)


class _Engine:
    supports_function_calling = True
    supports_response_schema = True
    supports_reasoning = False
    supported_params = SUPPORTED_PARAMS

    def __init__(self, settings: EngineSettings | None = None, **told: Any) -> None:
        self.settings = EngineSettings(**told) if settings is None else settings
        register_callback()

    def dump_state(self) -> dict[str, Any]:
        """Returns the settings, without the API key. Raises ``TypeError`` for an engine with a
        ``backend``."""
        return self.settings.dump()

    @classmethod
    def load_state(cls, state: dict[str, Any]) -> Self:
        """Returns the engine for a result of ``dump_state``."""
        return cls(EngineSettings(**state))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.settings!r})"

    def _asked(self, request: lm15.Request, call: CallNotes, *, is_streamed: bool = False) -> Asked:
        if not isinstance(request, lm15.Request):
            raise TypeError(f"an engine takes a dspy.lm15.Request, not {type(request).__name__}")
        return asked_of(request, self.settings, call, is_streamed=is_streamed)


class AgentflowEngine(_Engine):
    """The blocking engine, for ``dspy.LM(model, engine=…)``; ``AgentflowLM`` has one. Its arguments are the
    fields of ``EngineSettings``.

    >>> settings = EngineSettings(base_url="ws://127.0.0.1:8410")
    >>> engine, async_engine = AgentflowEngine(settings), AsyncAgentflowEngine(settings)
    >>> lm = dspy.LM("agentflow/smollm2-135m", engine=engine, async_engine=async_engine)
    """

    def complete(self, request: lm15.Request) -> lm15.Response:
        """Returns one answer. Raises errors of ``dspy.lm15``."""
        call = notes()
        if call.ready:
            return call.next()
        with _engine_errors():
            asked = self._asked(request, call)
            answers = complete(self.settings.connection(request.model), asked)
        return call.give([_response_of(answer) for answer in answers])

    def stream(self, request: lm15.Request) -> Generator[Any, None, None]:
        """Yields the events of one answer."""
        writer, call = _EventWriter(request.model), notes()
        yield writer.start()
        with _engine_errors():
            asked = self._asked(request, call, is_streamed=True)
            with closing(stream(self.settings.connection(request.model), asked)) as events:
                for event in events:
                    yield from writer.end(event) if isinstance(event, Answer) else writer.deltas(event)
        call.num_given += 1

    def close(self) -> None:
        """Does nothing: the connection belongs to the process."""


class AsyncAgentflowEngine(_Engine):
    """The engine for event loops, for ``dspy.LM(model, engine=…, async_engine=…)``."""

    async def complete(self, request: lm15.Request) -> lm15.Response:
        """Returns one answer. Raises errors of ``dspy.lm15``."""
        call = notes()
        if call.ready:
            return call.next()
        with _engine_errors():
            asked = self._asked(request, call)
            answers = await acomplete(self.settings.connection(request.model), asked)
        return call.give([_response_of(answer) for answer in answers])

    async def stream(self, request: lm15.Request) -> AsyncGenerator[Any, None]:
        """Yields the events of one answer."""
        writer, call = _EventWriter(request.model), notes()
        yield writer.start()
        with _engine_errors():
            asked = self._asked(request, call, is_streamed=True)
            async with aclosing(astream(self.settings.connection(request.model), asked)) as events:
                async for event in events:
                    for delta in writer.end(event) if isinstance(event, Answer) else writer.deltas(event):
                        yield delta
        call.num_given += 1

    async def aclose(self) -> None:
        """Does nothing: the connection belongs to the process."""


_SAMPLING: Final = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")
# Arguments of ``af.gen`` that a Request has no field for; its ``extensions`` have them.
_EXTENSIONS: Final = frozenset(
    (
        "min_tokens",
        "min_p",
        "repetition_penalty",
        "logit_bias",
        "stop_token_ids",
        "stop_regex",
        "ignore_eos",
        "regex",
        "choices",
        "grammar",
        "whitespace",
    )
)
_CONSTRAINTS: Final = frozenset(("regex", "grammar"))
_LEFT_OUT: Final = (lm15.ThinkingPart, lm15.ToolCallPart)


def asked_of(
    request: lm15.Request, settings: EngineSettings, notes: CallNotes, *, is_streamed: bool = False
) -> Asked:
    """Converts a request to one call, with all answers that DSPy will request unless there is a seed. Raises
    ``NotSupported`` for features that agentflow does not have."""
    tools = [_tool(tool) for tool in request.tools]
    sampling = _sampling(request.config)
    if request.config.seed is not None:
        sampling["seed"] = notes.seed(request.config.seed, notes.num_given)
    own = {name: sampling.pop(name) for name in _CONSTRAINTS if name in sampling}
    # With tools, the adapter parses calls and free text.
    found = None if own or tools else notes.answer_format
    wanted = {} if tools else _wanted(request.config)
    return Asked(
        _messages_of(request),
        sampling,
        tools,
        _choice(request.config.tool_choice, bool(tools), notes.must_call),
        own or (wanted if found is None else found.constraint()),
        found,
        1 if is_streamed or "seed" in sampling else notes.n - notes.num_given,
        settings.cache_salt,
        settings.timeout,
        is_streamed,
    )


def _sampling(config: lm15.Config) -> dict[str, Any]:
    _check(config)
    told = {name: getattr(config, name) for name in _SAMPLING if getattr(config, name) is not None}
    told.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    if config.stop:
        told["stop"] = list(config.stop)
    if config.logprobs is not None:
        told |= {"logprobs": True, "top_logprobs": max(config.logprobs, 1)}
    told |= _extensions(config)
    if told.get("logit_bias"):
        told["logit_bias"] = {int(token): bias for token, bias in told["logit_bias"].items()}
    return told


def _extensions(config: lm15.Config) -> dict[str, Any]:
    return {name: value for name, value in (config.extensions or {}).items() if not is_cache_scope(name)}


def _check(config: lm15.Config) -> None:
    unknown = sorted(_extensions(config).keys() - _EXTENSIONS)
    if unknown:
        raise af.errors.NotSupported(f"there is no parameter {', '.join(unknown)}")
    if config.reasoning is not None and not config.reasoning.is_off:
        raise af.errors.NotSupported(
            "reasoning is not supported (use dspy.ChainOfThought for step-by-step answers)"
        )
    if config.probabilities == "required":
        raise af.errors.NotSupported("probabilities are not supported")


def _wanted(config: lm15.Config) -> dict[str, Any]:
    wanted = config.response_format
    if wanted is None:
        return {}
    return {"schema": wanted["schema"] if wanted["type"] == "json_schema" else {"type": "object"}}


def _choice(asked: lm15.ToolChoice | None, has_tools: bool, must_call: bool) -> ToolChoice:
    if not has_tools:
        return ToolChoice("none")
    if asked is None or (must_call and asked.mode == "auto" and not asked.allowed):
        # If only calls are wanted, the adapter cannot parse anything else.
        parallel = asked is None or asked.parallel is not False
        return ToolChoice("required" if must_call else "auto", parallel=parallel)
    parallel = asked.parallel is not False
    if len(asked.allowed) == 1 and asked.mode == "required":
        return ToolChoice("required", asked.allowed[0], parallel=parallel)
    if asked.allowed:
        raise af.errors.NotSupported("tool_choice cannot allow a subset of the tools: pass only these tools")
    return ToolChoice(asked.mode, parallel=parallel)


def _tool(tool: Any) -> ToolSpec:
    if not isinstance(tool, lm15.FunctionTool):
        raise af.errors.NotSupported(
            f"the tool {tool.name!r} is not a function: only function tools are supported"
        )
    return ToolSpec(tool.name, tool.description or "", tool.parameters, strict=False)


def _messages_of(request: lm15.Request) -> list[af.Message]:
    """Converts the conversation. Raises ``NotSupported`` for content that is not text."""
    told = []
    if request.system is not None:
        system = request.system if isinstance(request.system, str) else _text("system", request.system)
        told.append(af.Message("system", system))
    for message in request.messages:
        told += _turns(message)
    return told


def _turns(message: lm15.Message) -> list[af.Message]:
    if message.role == "tool":
        return [
            af.Message("tool", _text("tool", part.content), tool_call_id=part.id, name=part.name)
            for part in message.parts_of(lm15.ToolResultPart)
        ]
    calls = tuple(
        [af.ToolCall(part.name, part.input, part.id) for part in message.parts_of(lm15.ToolCallPart)]
    )
    role = "system" if message.role == "developer" else message.role
    return [af.Message(role, _text(role, message.parts), tool_calls=calls)]


def _text(role: str, parts: Any) -> str:
    return "".join([_part_text(role, part) for part in parts if not isinstance(part, _LEFT_OUT)])


def _part_text(role: str, part: Any) -> str:
    if isinstance(part, lm15.TextPart | lm15.RefusalPart):
        return str(part.text)
    if isinstance(part, lm15.DataPart):
        return json.dumps(part.value, ensure_ascii=False)
    raise af.errors.NotSupported(
        f"a {role} message has a part of type {part.type!r}, and this model takes text only"
    )


def _response_of(answer: Answer) -> lm15.Response:
    """Converts a complete answer."""
    reply = read_reply(answer.text)
    parts: list[Any] = [lm15.TextPart(reply.text)] if reply.text or not reply.tool_calls else []
    parts += [lm15.ToolCallPart(call.id, call.name, _read(call.text)) for call in reply.tool_calls]
    return lm15.Response(
        id=None,
        model=answer.model,
        message=lm15.Message("assistant", tuple(parts)),
        finish_reason=_reason(answer, has_calls=bool(reply.tool_calls)),
        usage=_usage(answer),
        logprobs=_logprobs(answer),
    )


def _read(arguments: str) -> dict[str, Any]:
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):  # truncated by max_tokens, for example
        return {"partial_json": arguments}
    return found if isinstance(found, dict) else {"value": found}


def _reason(answer: Answer, *, has_calls: bool) -> lm15.FinishReason:
    if answer.finish_reason == "length":
        return "length"
    return "tool_call" if has_calls else "stop"


def _usage(answer: Answer) -> lm15.Usage:
    return lm15.Usage(
        input_tokens=answer.usage.prompt_tokens,
        output_tokens=answer.usage.output_tokens,
        cache_read_tokens=answer.usage.cached_tokens,
    )


def _logprobs(answer: Answer) -> tuple[lm15.TokenLogprob, ...] | None:
    if answer.logprobs is None:
        return None
    return tuple(
        [
            lm15.TokenLogprob(
                token, logprob, top=tuple([lm15.TopLogprob(one.text, one.logprob) for one in likely])
            )
            for token, logprob, likely in tokens_of(answer)
        ]
    )


class _EventWriter:
    """Makes the events of one streamed answer. Parts are numbered in the order in which they begin."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._num_parts = 0
        self._has_text = False
        self._num_calls = 0

    def start(self) -> lm15.StreamStartEvent:
        """Returns the first event."""
        return lm15.StreamStartEvent(model=self._model)

    def deltas(self, event: Delta) -> Iterator[lm15.StreamDeltaEvent]:
        """Yields the events for the next piece."""
        piece = event.piece
        match piece:
            case CallBegun():
                self._begin_part(is_text=False)
                self._num_calls += 1
                delta: Any = lm15.ToolCallDelta(
                    input="", part_index=self._num_parts - 1, id=piece.id, name=piece.name
                )
            case Arguments():
                delta = lm15.ToolCallDelta(input=piece.text, part_index=self._num_parts - 1)
            case _:
                if not self._has_text:
                    self._begin_part(is_text=True)
                delta = lm15.TextDelta(text=piece.text, part_index=self._num_parts - 1)
        yield lm15.StreamDeltaEvent(delta)

    def end(self, answer: Answer) -> Iterator[lm15.StreamDeltaEvent | lm15.StreamEndEvent]:
        """Yields the last events."""
        logprobs = _logprobs(answer)
        if logprobs:
            yield lm15.StreamDeltaEvent(
                lm15.TextDelta(text="", part_index=max(self._num_parts - 1, 0), logprobs=logprobs)
            )
        reason = _reason(answer, has_calls=self._num_calls > 0)
        yield lm15.StreamEndEvent(finish_reason=reason, usage=_usage(answer))

    def _begin_part(self, *, is_text: bool) -> None:
        self._has_text = is_text
        self._num_parts += 1


_KINDS: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], Any], ...]] = (
    (af.PromptTooLong, lm15.ContextLengthError),
    (af.errors.UnknownModel, lm15.UnsupportedModelError),
    (af.errors.NotAuthorized, lm15.AuthError),
    (af.errors.RateLimited, lm15.RateLimitError),
    (af.DeadlineExceeded, lm15.TimeoutError),
    ((af.errors.ServerUnreachable, af.ServerLost), lm15.TransportError),
    (af.errors.NotSupported, lm15.UnsupportedFeatureError),
    (
        (af.errors.BadArgument, af.errors.RequestRefused, af.errors.LimitExceeded, af.errors.ScriptMismatch),
        lm15.InvalidRequestError,
    ),
    ((af.errors.ServerError, af.errors.EngineFailed), lm15.ServerError),  # which DSPy retries
    (af.AgentflowError, lm15.ProviderError),
)


def _as_lm15(error: af.AgentflowError) -> Exception:
    """Returns the error that an engine of DSPy raises instead."""
    kind: Any = next(kind for known, kind in _KINDS if isinstance(error, known))
    if kind is lm15.AuthError:
        hint = "pass api_key= to AgentflowLM, or set AGENTFLOW_API_KEY"
        kind = partial(kind, credential_hint=hint)
    wrapped: Exception = kind(str(error), provider="agentflow")
    return wrapped


@contextmanager
def _engine_errors() -> Iterator[None]:
    """Converts agentflow's errors that are raised in the block."""
    try:
        yield
    except af.AgentflowError as error:
        raise _as_lm15(error) from error
