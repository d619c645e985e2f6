"""Where a request comes from: its trace, and its place in a program that runs at the client.

A client names the program of a request in a header. Dynamo's names (``ai-dynamo`` 1.6) are also supported:
``x-dynamo-session-id`` is a program whose requests follow one another until a request with
``x-dynamo-session-final``; a session with ``x-dynamo-parent-session-id`` belongs to the parent's program; and
``nvext.agent_hints`` has advice. Advice does not change answers, so invalid values are ignored, as in Dynamo.
Without these, OpenAI's ``prompt_cache_key`` names the program: agents send the id of their conversation. The
``kv_hints`` of vLLM 0.32 are not part of its HTTP APIs; SGLang's ``/generate`` has them (``server.sglang``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Final, NamedTuple, TypeVar, get_args

import msgspec

from agentflow.engine.generator.context import EngineContext, number_of_name
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.request import MAX_PRIORITY
from agentflow.protocol.ops import MAX_SALT_CHARS, Objective
from agentflow.protocol.sampling import MAX_INT
from agentflow.runtime.generator import StateHint
from agentflow.runtime.programs.scheduling_hint import SchedulingHint
from agentflow.server.errors import ApiError, invalid_field

ValueT = TypeVar("ValueT")

PROGRAM_HEADER: Final = "x-agentflow-program"
GROUP_HEADER: Final = "x-agentflow-group"
OBJECTIVE_HEADER: Final = "x-agentflow-objective"
DYNAMO_SESSION_HEADER: Final = "x-dynamo-session-id"
PARENT_HEADER: Final = "x-dynamo-parent-session-id"
FINAL_HEADER: Final = "x-dynamo-session-final"
MAX_NAME_CHARS = 256


class _AgentHints(msgspec.Struct, frozen=True):
    priority: msgspec.Raw = msgspec.Raw()  # requests with a higher one run first
    strict_priority: msgspec.Raw = msgspec.Raw()  # the same; takes precedence over ``priority``
    latency_sensitivity: msgspec.Raw = msgspec.Raw()  # the former name of ``priority``
    osl: msgspec.Raw = msgspec.Raw()  # the expected number of output tokens
    speculative_prefill: msgspec.Raw = msgspec.Raw()  # prefill the next turn after the answer


class _NvExt(msgspec.Struct, frozen=True):
    agent_hints: _AgentHints = _AgentHints()


class _SaltedNvExt(msgspec.Struct, frozen=True):
    cache_salt: msgspec.Raw = msgspec.Raw()


class _Advice(NamedTuple):
    """``priority``: within the range of this server. ``output_tokens``: the expected length of the answer.
    ``prefills_next``: prefill the next turn after the answer."""

    priority: int | None = None
    output_tokens: int | None = None
    prefills_next: bool = False


def _read_advice(extension: msgspec.Raw | None) -> _Advice:
    if extension is None:
        return _Advice()
    try:
        hints = msgspec.json.decode(extension, type=_NvExt).agent_hints
    except msgspec.DecodeError:
        return _Advice()
    priority: float | None = _read(hints.strict_priority, _Unsigned) or _read(hints.priority, _Signed)
    if priority is None and (sensitivity := _read(hints.latency_sensitivity, float)) is not None:
        priority = sensitivity if math.isfinite(sensitivity) else None
    if priority is not None:
        priority = round(max(-MAX_PRIORITY, min(priority, MAX_PRIORITY)))
    num_tokens = _read(hints.osl, _Unsigned)
    return _Advice(
        priority,
        num_tokens if num_tokens and num_tokens <= MAX_INT else None,
        _read(hints.speculative_prefill, bool) is True,
    )


_Salt = Annotated[str, msgspec.Meta(max_length=MAX_SALT_CHARS)]
_Signed = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_Unsigned = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


def _read(value: msgspec.Raw, kind: type[ValueT]) -> ValueT | None:
    """The value, or None if it is missing or of another type."""
    try:
        return msgspec.json.decode(value or b"null", type=kind)
    except msgspec.DecodeError:
        return None


class Caller(NamedTuple):
    """The place of a request in a program of the client."""

    trace: str = ""  # the client's ``traceparent``
    program: str = ""  # the client's name for the program
    # The client's name for the requests of one stage, whose results one consumer waits for.
    group: str = ""
    objective: Objective | None = None
    output_tokens: int | None = None  # the expected length of the answer
    # The name of a program whose requests follow one another, such as an agent's.
    session: str = ""
    is_last: bool = False  # the last request of its session
    prefills_next: bool = False  # prefill the beginning of the next turn after the answer

    @classmethod
    def of(cls, headers: Mapping[str, str], trace: str) -> Caller:
        """Reads the headers. ``ApiError`` for an unknown objective."""
        session = headers.get(DYNAMO_SESSION_HEADER, "")[:MAX_NAME_CHARS]
        program = headers.get(PROGRAM_HEADER) or headers.get(PARENT_HEADER) or session
        objective = headers.get(OBJECTIVE_HEADER)
        if objective is not None and objective not in get_args(Objective):
            message = f"{OBJECTIVE_HEADER} must be latency or throughput, not {objective[:40]!r}"
            raise ApiError(400, "invalid_request", message, param=OBJECTIVE_HEADER)
        return cls(
            trace,
            program[:MAX_NAME_CHARS],
            headers.get(GROUP_HEADER, "")[:MAX_NAME_CHARS],
            objective,  # type: ignore[arg-type]  # checked above
            session=session,
            is_last=headers.get(FINAL_HEADER, "").lower() == "true",
        )

    def advise(self, generator: EngineGenerator, context: EngineContext) -> None:
        """Gives the scheduler the hint of a new context, and the session it continues."""
        if self.session:
            generator.continue_session(context, self.session, is_last=self.is_last)
        if not (self.program or self.group or self.objective or self.output_tokens):
            return
        scheduling = SchedulingHint(
            program=number_of_name(self.program) if self.program else 0,
            group=number_of_name(f"{self.program}\0{self.group}") if self.group else 0,
            objective=self.objective or "latency",
        )
        generator.hint(context, StateHint(self.objective, self.output_tokens, scheduling=scheduling))


ANYONE: Final = Caller()
"""A caller that names no program and gives no advice."""


def caller_with(caller: Caller, extension: msgspec.Raw | None = None, cache_key: str | None = None) -> Caller:
    """The caller with the advice in a request's ``nvext`` and ``prompt_cache_key``."""
    advice = _read_advice(extension)
    caller = caller._replace(output_tokens=advice.output_tokens, prefills_next=advice.prefills_next)
    if cache_key and not caller.program:
        caller = caller._replace(program=cache_key[:MAX_NAME_CHARS])
    return caller


def read_salt(salt: str | None, extension: msgspec.Raw | None) -> str:
    """The cache salt of a request: its own field, or the field in its ``nvext``. ``ApiError`` for an invalid
    salt: if it were ignored, the request's cache would be shared."""
    if salt or extension is None:
        return salt or ""
    try:
        given = msgspec.json.decode(extension, type=_SaltedNvExt).cache_salt
    except msgspec.DecodeError:  # not an object
        return ""
    try:
        return msgspec.json.decode(given or b"null", type=_Salt | None) or ""
    except msgspec.DecodeError as error:
        raise invalid_field("nvext.cache_salt", str(error)) from None


def read_priority(priority: int | None, extension: msgspec.Raw | None) -> int:
    """The priority of a request: its own field, or the field in its ``nvext``."""
    return (_read_advice(extension).priority or 0) if priority is None else priority
