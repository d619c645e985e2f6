"""The settings of a server: one schema, from which flags, environment variables and the keys of the file
follow.

A struct for each group, which is a table of the file; a field for each setting. Its type says what is
allowed, its ``Meta`` what it is. ``config_setting`` reads the rest off: ``--kv-tokens``,
``AGENTFLOW_SERVE_KV_TOKENS``, and ``kv_tokens`` in ``[engine]`` are one setting. Known to the bare frontend:
nothing here imports torch or a web framework.

One setting of the schema: its flag, its variable, its key, and how a value for it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta, Struct, inspect

from agentflow.engine.grammar.compiler.compiled import CompileLimits
from agentflow.engine.process.shutdown_budget import DRAIN_S
from agentflow.errors import BadArgument
from agentflow.protocol.wire import DEFAULT_PORT
from agentflow.server.config.limits import MIN_FRAME_BYTES, HttpLimits, ServerLimits

if TYPE_CHECKING:
    from agentflow.engine.local_engine import EngineOptions


DEFAULT_MODEL = "smollm2-135m"

_SERVER = ServerLimits()
_HTTP = HttpLimits()
_COMPILE = CompileLimits()

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
SecondsOrNone = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Text = Annotated[str, Meta(min_length=1)]
Policy = Literal["fair-lpm", "lpm", "dfs-weight", "fcfs", "random"]
LogLevel = Literal["debug", "info", "warning", "error"]
SECRET = {"secret": True}
FILE = {"metavar": "FILE"}


def _help(text: str, **extra: Any) -> Meta:
    return Meta(description=text, extra=extra or None)


class EngineSettings(Struct, frozen=True, kw_only=True):
    """How a model is run: for all models in ``[engine]``, for one in its own table, which comes first."""

    dtype: Annotated[Literal["bfloat16", "float32"], _help("of the weights")] = "bfloat16"
    device: Annotated[
        Literal["cpu", "cuda"] | None, _help("where the model runs (not set: a GPU where there is one)")
    ] = None
    kv_tokens: Annotated[
        Count | None, _help("tokens that the KV pool holds (not set: what the memory has room for)")
    ] = None
    token_budget: Annotated[
        Count | None, _help("rows of one forward pass (not set: 256 on a CPU, 4096 on a GPU)")
    ] = None
    max_running: Annotated[Count, _help("requests in one batch")] = 64
    threads: Annotated[Count | None, _help("CPU threads (not set: torch's choice, within the CPU quota)")] = (
        None
    )
    policy: Annotated[Policy, _help("the order in which requests are admitted")] = "fair-lpm"
    cache: Annotated[bool, _help("the prefix cache")] = True
    max_unfinished: Annotated[Count, _help("requests waiting and running at once; more are refused")] = 4096
    load_timeout_s: Annotated[
        Seconds | None, _help("loading may take so long (not set: 180 s, and 1 s for 20 MB of weights)")
    ] = None
    step_timeout_s: Annotated[
        Seconds | None, _help("one forward pass may take so long (not set: by what others took, 30 to 300 s)")
    ] = None
    exit_on_engine_failure: Annotated[
        bool, _help("end the server with status 1 when an engine died three times in a row")
    ] = False


class EngineConfig(EngineSettings, frozen=True, kw_only=True):
    """``[engine]``."""

    memory_share: Annotated[Share, _help("of the free memory, for weights and KV of all models together")] = (
        0.8
    )


class ModelConfig(EngineSettings, frozen=True, kw_only=True):
    """One model: ``[models.NAME]``, what its table leaves open taken from ``[engine]``."""

    name: str
    path: Annotated[Text, _help("a pulled model's name or a Hugging Face folder (not set: NAME)")]

    def engine_options(self) -> EngineOptions:
        """What the engine is started with, in a process of its own."""
        from agentflow.engine.local_engine import EngineOptions

        return EngineOptions(
            model=self.path,
            dtype=self.dtype,
            device=self.device,
            kv_tokens=self.kv_tokens,
            token_budget=self.token_budget,
            max_running=self.max_running,
            num_threads=self.threads,
            policy=self.policy,
            use_cache=self.cache,
            own_process=True,
            max_unfinished=self.max_unfinished,
            load_timeout_s=self.load_timeout_s,
            step_timeout_s=self.step_timeout_s,
            exit_on_engine_failure=self.exit_on_engine_failure,
        )


class NetworkConfig(Struct, frozen=True, kw_only=True):
    """``[network]``: where it listens, and to whom."""

    host: Annotated[Text, _help("address to listen on; 0.0.0.0: for other machines too")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535), _help("port to listen on (0: a free one)")] = DEFAULT_PORT
    tls_cert: Annotated[Text | None, _help("certificate chain (PEM): only https and wss then", **FILE)] = None
    tls_key: Annotated[Text | None, _help("the certificate's private key (PEM)", **FILE)] = None
    tls_key_password: Annotated[Text | None, _help("of that key", **SECRET)] = None
    cors_origins: Annotated[
        tuple[Text, ...], _help("web origins whose pages may call, such as https://app.example; *: any")
    ] = ()
    allowed_hosts: Annotated[
        tuple[Text, ...],
        _help(
            "host names that requests may name (not set: any; on loopback its own; without keys private ones)"
        ),
    ] = ()
    allow_anonymous: Annotated[
        bool, _help("listen beyond this machine without keys: whoever reaches it may use it")
    ] = False


class AccessConfig(Struct, frozen=True, kw_only=True):
    """``[access]``: who may use it. Without keys, everybody who reaches it."""

    keys_file: Annotated[
        Text | None, _help("API keys and tenants (TOML); `agentflow key` makes keys", **FILE)
    ] = None
    api_keys: Annotated[
        tuple[Text, ...],
        _help("a key that opens all; other users of this machine see flags: prefer a file", **SECRET),
    ] = ()

    @property
    def keys_path(self) -> Path | None:
        """``keys_file``."""
        return None if self.keys_file is None else Path(self.keys_file).expanduser()


class LimitsConfig(Struct, frozen=True, kw_only=True):
    """``[limits]``: what it takes from its clients."""

    body_bytes: Annotated[Count, _help("of one HTTP request's body")] = _HTTP.body_bytes
    frame_bytes: Annotated[int, Meta(ge=MIN_FRAME_BYTES), _help("of one websocket message")] = (
        _SERVER.frame_bytes
    )
    max_prompt_tokens: Annotated[
        Count | None, _help("of one HTTP request (not set: what the model's context holds)")
    ] = _HTTP.prompt_tokens
    bodies_bytes: Annotated[Count, _help("of the bodies of all HTTP requests that are being answered")] = (
        _HTTP.bodies_bytes
    )
    max_n: Annotated[Count, _help("answers to one HTTP request (its `n`)")] = _HTTP.max_n
    max_connections: Annotated[
        Count, _help("websockets open at once; with HTTP's, twice as many connections")
    ] = _SERVER.max_connections
    max_connections_per_address: Annotated[
        Count, _help("of both kinds from one address other than this machine")
    ] = _SERVER.max_connections_per_address
    max_sessions: Annotated[Count, _help("websocket sessions open at once")] = _SERVER.max_sessions
    session_bytes: Annotated[Count, _help("of memory for the texts, states and values of one session")] = (
        _SERVER.session_bytes
    )
    sessions_bytes: Annotated[Count, _help("of memory for those of all sessions")] = _SERVER.sessions_bytes
    resume_grace_s: Annotated[SecondsOrNone, _help("how long a session outlives a broken connection")] = (
        _SERVER.resume_grace_s
    )
    hello_timeout_s: Annotated[Seconds, _help("how long a new websocket may stay silent")] = (
        _SERVER.hello_timeout_s
    )
    ping_interval_s: Annotated[Seconds, _help("silent websockets are probed so often")] = (
        _SERVER.ping_interval_s
    )
    idle_timeout_s: Annotated[Seconds, _help("how long a connection may stay open without a request")] = (
        _SERVER.idle_timeout_s
    )
    header_timeout_s: Annotated[Seconds, _help("how long a request's headers may take to arrive")] = (
        _SERVER.header_timeout_s
    )
    body_timeout_s: Annotated[Seconds, _help("how long a request's body may take to arrive")] = (
        _HTTP.body_timeout_s
    )
    stream_keepalive_s: Annotated[
        Seconds, _help("a stream that was silent for so long is sent what clients skip")
    ] = _HTTP.stream_keepalive_s
    compile_cpu_s: Annotated[Seconds, _help("processor time to compile one constraint")] = _COMPILE.cpu_s
    compile_wall_s: Annotated[Seconds, _help("time on the clock to compile one")] = _COMPILE.wall_s
    compile_memory_bytes: Annotated[Count, _help("memory to compile one")] = _COMPILE.memory_bytes
    compile_cpu_share: Annotated[Share, _help("of one processor, for compiling in the long run")] = (
        _COMPILE.cpu_share
    )
    compile_cache_bytes: Annotated[int, Meta(ge=0), _help("compiled constraints that are kept")] = (
        _COMPILE.cache_bytes
    )

    def server_limits(self) -> ServerLimits:
        """Those of connections and sessions."""
        return ServerLimits(**{name: getattr(self, name) for name in ServerLimits.__dataclass_fields__})

    def http_limits(self) -> HttpLimits:
        """Those of one HTTP request."""
        return HttpLimits(
            body_bytes=self.body_bytes,
            body_timeout_s=self.body_timeout_s,
            prompt_tokens=self.max_prompt_tokens,
            max_n=self.max_n,
            bodies_bytes=self.bodies_bytes,
            stream_keepalive_s=self.stream_keepalive_s,
        )

    def compile_limits(self) -> CompileLimits:
        """Those of constraints."""
        return CompileLimits(
            cpu_s=self.compile_cpu_s,
            wall_s=self.compile_wall_s,
            memory_bytes=self.compile_memory_bytes,
            cpu_share=self.compile_cpu_share,
            cache_bytes=self.compile_cache_bytes,
        )


class OverloadConfig(Struct, frozen=True, kw_only=True):
    """``[overload]``: when it says no, and how it ends."""

    max_wait_s: Annotated[
        SecondsOrNone, _help("who would wait longer for the first token is refused with 503")
    ] = 60.0
    drain_s: Annotated[
        SecondsOrNone, _help("how long answers may go on after SIGTERM before they are cut")
    ] = DRAIN_S


class LogsConfig(Struct, frozen=True, kw_only=True):
    """``[logs]``: what is written down."""

    log_level: Annotated[LogLevel, _help("what is logged, on standard error")] = "info"
    log_format: Annotated[Literal["text", "json"], _help("lines to read, or one JSON object a line")] = "text"
    log_prompts: Annotated[bool, _help("prompts and answers too, 20,000 bytes of each")] = False
    record_workload: Annotated[
        Text | None,
        _help(
            "write what is served to this new file (.jsonl, .jsonl.gz), prompts too, for `simulate`", **FILE
        ),
    ] = None

    @property
    def workload_path(self) -> Path | None:
        """``record_workload``."""
        return None if self.record_workload is None else Path(self.record_workload).expanduser()


class ServeConfig(Struct, frozen=True, kw_only=True):
    """All of it. ``models``: at least one; sessions that name none get the first."""

    models: tuple[ModelConfig, ...]
    engine: EngineConfig = EngineConfig()
    network: NetworkConfig = NetworkConfig()
    access: AccessConfig = AccessConfig()
    limits: LimitsConfig = LimitsConfig()
    overload: OverloadConfig = OverloadConfig()
    logs: LogsConfig = LogsConfig()


GROUPS: dict[str, type[Struct]] = {
    "engine": EngineConfig,
    "network": NetworkConfig,
    "access": AccessConfig,
    "limits": LimitsConfig,
    "overload": OverloadConfig,
    "logs": LogsConfig,
}
"""The tables of the file beside ``models``, in the order in which they are shown."""


VARIABLE_PREFIX = "AGENTFLOW_SERVE_"
# Longer ones are cut in error messages.
MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a group. ``type``: as annotated; ``kind``: as msgspec sees it, without None."""

    group: str
    name: str
    help: str
    default: Any
    type: Any
    kind: inspect.Type
    is_secret: bool
    metavar: str
    """What stands for the value in the help."""

    @property
    def is_list(self) -> bool:
        """Whether it holds several values; its flag may be repeated."""
        return isinstance(self.kind, inspect.VarTupleType)

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off."""
        return isinstance(self.kind, inspect.BoolType)

    @property
    def flag(self) -> str:
        """``--kv-tokens``; a list's is of one of its values: ``--api-key``."""
        return f"--{self._one.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """``AGENTFLOW_SERVE_KV_TOKENS``; a list's values stand in it with commas between them."""
        return VARIABLE_PREFIX + self._one.upper()

    @property
    def _one(self) -> str:
        return self.name.removesuffix("s") if self.is_list else self.name

    def from_text(self, text: str, where: str) -> Any:
        """The value of a flag or a variable. ``BadArgument`` names ``where``."""
        if self.is_list:
            return self._converted([part.strip() for part in text.split(",") if part.strip()], where)
        try:
            return self._checked(msgspec.convert(text, self.type, strict=False))
        except msgspec.ValidationError:
            raise self._wrong(text, where) from None

    def from_values(self, values: list[str], where: str) -> Any:
        """The value of a list's flag, which was given so often."""
        return self._converted(values, where)

    def from_toml(self, value: Any, where: str) -> Any:
        """The value of a key of the file."""
        return self._converted(value, where)

    def _converted(self, value: Any, where: str) -> Any:
        try:
            return self._checked(msgspec.convert(value, self.type))
        except msgspec.ValidationError:
            raise self._wrong(value, where) from None

    @staticmethod
    def _checked(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise msgspec.ValidationError("not finite")
        return value

    def _wrong(self, value: Any, where: str) -> BadArgument:
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
        return BadArgument(f"{where} must be {self.allowed}" + ("" if self.is_secret else f", not {shown}"))

    @property
    def allowed(self) -> str:
        """What it may be, in words.

        >>> all_settings()["port"].allowed
        'a whole number from 0 to 65535'
        """
        return _allowed(self.kind)


def _allowed(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"a whole number{_range(kind)}"
        case inspect.FloatType():
            return f"a number{_range(kind)}"
        case inspect.LiteralType(values=values):
            return f"one of {', '.join(map(str, values))}"
        case inspect.VarTupleType(item_type=item):
            return f"a list, each item {_allowed(_plain(item))}"
        case _:
            return "a text that is not empty"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    low = f", at least {kind.ge:g}" if kind.ge is not None else f" above {kind.gt:g}"
    return low + (f" and at most {kind.le:g}" if kind.le is not None else "")


def _plain(kind: inspect.Type) -> inspect.Type:
    """Without what only describes it, and without None."""
    while True:
        match kind:
            case inspect.Metadata(type=inner):
                kind = inner
            case inspect.UnionType(types=types):
                (kind,) = (one for one in types if not isinstance(one, inspect.NoneType))
            case _:
                return kind


def _settings_of(group: str, struct: type[msgspec.Struct]) -> Iterator[Setting]:
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        described = [meta for meta in getattr(hints[field.name], "__metadata__", ()) if meta.description]
        if not described:  # `name`, which is no key of its own
            continue
        kind = _plain(inspect.type_info(hints[field.name]))
        extra = described[0].extra or {}
        yield Setting(
            group=group,
            name=field.name,
            help=described[0].description,
            default=None if field.required else field.default,
            type=hints[field.name],
            kind=kind,
            is_secret=bool(extra.get("secret")),
            metavar=extra.get("metavar") or _metavar(field.name, kind),
        )


def _metavar(name: str, kind: inspect.Type) -> str:
    match kind:
        case inspect.LiteralType(values=values):
            return "{" + ",".join(map(str, values)) + "}"
        case inspect.IntType() | inspect.FloatType():
            return "SECONDS" if name.endswith("_s") else "N"
        case inspect.VarTupleType():
            name = name.removesuffix("s")
    return name.rpartition("_")[2].upper()


def _by_name(settings: Iterable[Setting]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for setting in settings:
        assert setting.name not in found, f"two settings are named {setting.name}"
        found[setting.name] = setting
    return found


@cache
def all_settings() -> dict[str, Setting]:
    """Those with a flag and a variable, by name, in the order of the groups."""
    return _by_name(setting for group, struct in GROUPS.items() for setting in _settings_of(group, struct))


@cache
def model_settings() -> dict[str, Setting]:
    """The keys of a model's own table, by name."""
    return _by_name(_settings_of("models", ModelConfig))


@cache
def shared_names() -> tuple[str, ...]:
    """The keys that ``[engine]`` and a model's own table have in common."""
    return tuple(setting.name for setting in _settings_of("engine", EngineSettings))
