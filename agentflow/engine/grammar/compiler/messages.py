"""A constraint after compilation: what travels from the compiling process to the engine.

What goes over the socket between a server and its compiling process.

First ``StartCompiling`` and the answer ``Ready``; then constraints, one a frame and one at a time, each with
its ``CompileEnd``.
"""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from agentflow.errors import AgentflowError, Overloaded, RequestRefused, from_code
from agentflow.protocol.constraint import Constraint
from agentflow.runtime.declared import Count, Declared, Fraction, Seconds, doc


class CompiledConstraint(msgspec.Struct, frozen=True, array_like=True):
    """``key``: equal for equal constraints of a tenant. ``payload``: an ``Dfa`` as
    ``Dfa.to_bytes`` writes it, or a grammar as ``llguidance`` takes it (UTF-8); empty where the key says it
    all to an engine that has had it before."""

    key: str
    form: Literal["dfa", "llguidance"]
    payload: bytes


class CompileConstraint(Protocol):
    """What ``StartCompiling.loader`` names."""

    def __call__(self, constraint: Constraint) -> CompiledConstraint: ...


class StartCompiling(msgspec.Struct, frozen=True):
    """``loader``: the name of a ``CompileConstraint``, as in ``package.module:function``. The limits are
    of one job, as in ``CompileLimits``."""

    loader: str
    cpu_s: float
    memory_bytes: int
    compiled_bytes: int


class Ready(msgspec.Struct, frozen=True):
    """The process waits for constraints; or it ends, because of a ``problem``."""

    problem: str = ""


class CompileFailure(msgspec.Struct, frozen=True):
    """An error of the tree in ``errors.py``. ``is_final``: it would come again if one tried again.
    ``retry_after_s``: of an ``Overloaded``, when that makes sense. ``param``: ``instead`` where that part of
    the constraint is wrong."""

    code: str
    message: str
    is_final: bool = True
    retry_after_s: float | None = None
    param: str | None = None

    def to_error(self) -> AgentflowError:
        """A new error each time: each gets a traceback of its own."""
        error = from_code(self.code, self.message)
        if isinstance(error, Overloaded):
            error.retry_after_s = self.retry_after_s
        error.param = self.param
        return error


class CompileEnd(msgspec.Struct, frozen=True):
    """One of the two. ``is_last``: the process has grown too large and takes no more."""

    compiled: CompiledConstraint | None = None
    failure: CompileFailure | None = None
    is_last: bool = False


start_decoder = msgspec.msgpack.Decoder(StartCompiling)
ready_decoder = msgspec.msgpack.Decoder(Ready)
constraint_decoder = msgspec.msgpack.Decoder(Constraint)
end_decoder = msgspec.msgpack.Decoder(CompileEnd)


def over_limit(constraint: Constraint, what: str) -> CompileFailure:
    """Of a constraint that reaches a limit: ``what`` says which."""
    message = f"{constraint.kind}: it {what}, which is the limit for compiling a constraint"
    return CompileFailure(RequestRefused.code, message)


def over_cpu_time(constraint: Constraint, cpu_s: float) -> CompileFailure:
    """Of a constraint that has had so much of a processor, and was not done."""
    return over_limit(constraint, f"takes more than {cpu_s:g} s of processor time")


def megabytes(num_bytes: int) -> str:
    """For people."""
    return f"{num_bytes / 1e6:.3g} MB"


class CompileLimits(Declared, frozen=True, kw_only=True):
    """Limits of compiling constraints. Only ``cpu_s``, ``memory_bytes`` and ``compiled_bytes`` refuse a
    constraint for good. ``wall_s`` also counts time in which the engine uses the processors: a request that
    reaches it is answered with ``Overloaded``, and so is one whose constraint has used ``contended_s`` of
    processor time while another tenant waits."""

    cpu_s: Annotated[Seconds, doc("processor time to compile one constraint")] = 6.0
    contended_s: Seconds = 0.25
    wall_s: Annotated[Seconds, doc("elapsed time to compile one constraint")] = 30.0
    memory_bytes: Annotated[Count, doc("memory to compile one constraint")] = 512_000_000
    compiled_bytes: Count = 16_000_000
    cpu_share: Annotated[Fraction, doc("part of one processor that compiling may use in the long run")] = 0.2
    max_waiting: Count = 1_024
    max_waiting_per_tenant: Count = 64
    cache_bytes: Annotated[int, Meta(ge=0), doc("memory for the cache of compiled constraints")] = 64_000_000
