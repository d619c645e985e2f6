"""The messages between a server and its compiling process, and the limits of compiling.

The server sends ``StartCompiling`` and receives ``Ready``; then it sends one ``Constraint`` at a time and
receives a ``CompileEnd`` for each.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from agentflow.errors import RequestRefused
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import ErrorInfo
from agentflow.runtime.declared import Count, Declared, Fraction, Seconds, doc


class Lengths(msgspec.Struct, frozen=True, array_like=True):
    """The lengths at which parts of a JSON value end; see ``Constraint``. Numbers are always bounded."""

    string_chars: int | None = None  # None: no limit
    list_items: int | None = None  # None: no limit


class SchemaPart(msgspec.Struct, frozen=True, array_like=True):
    """A client's schema within the schema of a constraint."""

    path: tuple[str | int, ...]  # the keys that lead to the schema
    name: str  # of the tool whose arguments it describes; empty for the form of an answer
    param: str  # of its errors; empty for the form of an answer
    is_strict: bool = True  # otherwise it may be relaxed


class PartedConstraint(Constraint, frozen=True, omit_defaults=True):
    """A JSON schema, or tags with one each, which contains schemas of a client. Clients of sessions cannot
    send it, because only HTTP reports relaxed keywords."""

    parts: tuple[SchemaPart, ...] = ()
    instead: PartedConstraint | None = None

    @classmethod
    def of(cls, constraint: Constraint, *parts: SchemaPart) -> PartedConstraint:
        """Returns the constraint with these parts."""
        fields = {name: getattr(constraint, name) for name in constraint.__struct_fields__}
        if constraint.instead is not None:
            fields["instead"] = cls.of(constraint.instead)
        if isinstance(constraint, PartedConstraint):
            parts = (*constraint.parts, *parts)
        return cls(**{**fields, "parts": parts})

    @classmethod
    def relaxable(cls, constraint: Constraint) -> PartedConstraint:
        """Returns the constraint of a schema that may be relaxed completely."""
        return cls.of(constraint, SchemaPart((), "", "", is_strict=False))

    def schema_source(self) -> str:
        """Returns the text of the schema. The schemas of several tags become alternatives of one schema."""
        if self.kind != "tags":
            return self.source
        sources = [tag.source for tag in self.tags()]
        if len(sources) == 1:
            return sources[0]
        definitions: dict[str, Any] = {}
        options: list[dict[str, Any]] = []
        for source in sources:
            schema = json.loads(source)
            definitions |= schema.pop("$defs", {})
            options.append(schema)
        return json.dumps({"anyOf": options, "$defs": definitions}, ensure_ascii=False)

    def with_schema(self, source: str) -> PartedConstraint:
        """Returns the constraint with another schema."""
        if self.kind == "tags":
            tags = self.tags()
            sources = [source]
            if len(tags) > 1:
                schema = json.loads(source)
                shared = {"$defs": schema["$defs"]} if schema.get("$defs") else {}
                sources = [json.dumps({**one, **shared}, ensure_ascii=False) for one in schema["anyOf"]]
            rules = [msgspec.structs.replace(tag, source=one) for tag, one in zip(tags, sources, strict=True)]
            source = msgspec.json.encode(rules).decode()
        return msgspec.structs.replace(self, source=source)


class Relaxed(msgspec.Struct, frozen=True, array_like=True):
    """A keyword of a client's schema that the grammar does not enforce."""

    name: str  # as in ``SchemaPart``
    path: tuple[str, ...]  # the keys that lead to the keyword; empty if the whole schema was relaxed


class CompiledConstraint(msgspec.Struct, frozen=True, array_like=True):
    """A constraint in the engine's form."""

    key: str  # equal for equal constraints of a tenant
    form: Literal["dfa", "llguidance"]
    # A ``Dfa`` from ``Dfa.to_bytes``, or a grammar for llguidance (UTF-8). Empty if the engine already has it
    # under the key.
    payload: bytes
    lengths: Lengths | None = None  # of a JSON value, for ``LengthMatcher``
    relaxed: tuple[Relaxed, ...] = ()  # the keywords that the compiled form does not enforce
    # The most members and options that its schemas allow at one place; raises the parser's limit of items.
    num_alternatives: int = 0

    def limited(self, constraint: Constraint) -> CompiledConstraint:
        """Returns the compiled form with the lengths of ``constraint``, from which it was compiled."""
        if constraint.kind != "schema":
            return self
        lengths = Lengths(constraint.string_chars, constraint.list_items)
        if self.form == "dfa" and lengths == Lengths():  # a DFA bounds numbers itself
            return self
        return msgspec.structs.replace(self, lengths=lengths)


class CompileConstraint(Protocol):
    """The type of the function ``StartCompiling.loader``."""

    def __call__(self, constraint: Constraint) -> CompiledConstraint: ...


class StartCompiling(msgspec.Struct, frozen=True):
    """The first message to the process: the compiling function, and the limits of ``CompileLimits`` for one
    constraint."""

    loader: str  # the name of a ``CompileConstraint``, as ``package.module:function``
    cpu_s: float
    memory_bytes: int
    compiled_bytes: int


class Ready(msgspec.Struct, frozen=True):
    """The process waits for constraints or, if there is a ``problem``, exits."""

    problem: str = ""


class CompileFailure(ErrorInfo, frozen=True):
    """The error of a constraint that cannot be compiled."""

    is_final: bool = True  # compiling again would fail again


class CompileEnd(msgspec.Struct, frozen=True):
    """The answer to a constraint. Exactly one of ``compiled`` and ``failure`` is set."""

    compiled: CompiledConstraint | None = None
    failure: CompileFailure | None = None
    is_last: bool = False  # the process has grown too large and accepts no more constraints


start_decoder = msgspec.msgpack.Decoder(StartCompiling)
ready_decoder = msgspec.msgpack.Decoder(Ready)
constraint_decoder = msgspec.msgpack.Decoder(PartedConstraint)
end_decoder = msgspec.msgpack.Decoder(CompileEnd)


def over_limit(constraint: Constraint, what: str) -> CompileFailure:
    """Returns the failure of a constraint that reaches the limit ``what``."""
    message = f"{constraint.kind}: it {what}, which is the limit for compiling a constraint"
    return CompileFailure(RequestRefused.code, message)


def over_cpu_time(constraint: Constraint, cpu_s: float) -> CompileFailure:
    """Returns the failure of a constraint that used up its processor time."""
    return over_limit(constraint, f"takes more than {cpu_s:g} s of processor time")


def megabytes(num_bytes: int) -> str:
    """Formats a size for messages."""
    return f"{num_bytes / 1e6:.3g} MB"


class CompileLimits(Declared, frozen=True, kw_only=True):
    """The limits of compiling.

    For one constraint: ``cpu_s`` of processor time, ``memory_bytes`` of memory, ``compiled_bytes`` of result;
    only these make a constraint fail permanently. ``wall_s``: after this time on the clock, which also runs
    while the engine has the processors, the request fails with ``Overloaded`` and may be retried.
    ``contended_s``: the same happens after this much processor time if another tenant waits. For all
    constraints: ``cpu_share`` of one processor in the long run, ``max_waiting`` in the queues,
    ``max_waiting_per_tenant`` in one, ``cache_bytes`` of compiled constraints in the cache.
    """

    cpu_s: Annotated[Seconds, doc("processor time to compile one constraint")] = 6.0
    contended_s: Seconds = 0.25
    wall_s: Annotated[Seconds, doc("elapsed time to compile one constraint")] = 30.0
    memory_bytes: Annotated[Count, doc("memory to compile one constraint")] = 512_000_000
    compiled_bytes: Count = 16_000_000
    cpu_share: Annotated[Fraction, doc("part of one processor that compiling may use in the long run")] = 0.2
    max_waiting: Count = 1_024
    max_waiting_per_tenant: Count = 64
    cache_bytes: Annotated[int, Meta(ge=0), doc("memory for the cache of compiled constraints")] = 64_000_000
