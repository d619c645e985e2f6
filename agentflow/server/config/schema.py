"""The settings of a server: one schema, from which flags, environment variables and file keys are derived.

Each section of ``ServeConfig`` is a struct, and each field with a help text is a setting. Limits and engine
settings are declared on the structs that the server and the engine use. ``Setting`` derives from a field a
flag (``--kv-tokens``), a variable (``AGENTFLOW_SERVE_KV_TOKENS``) and a key of the file (``kv_tokens`` in
``[engine]``). The module imports neither torch nor a web framework, so the commands work in a bare install.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta, Struct, inspect

from agentflow.cluster.ray.options import RayOptions
from agentflow.engine.grammar.compiler.messages import CompileLimits
from agentflow.engine.options import EngineOptions, EngineSettings
from agentflow.engine.process.shutdown_budget import DRAIN_S
from agentflow.errors import BadArgument
from agentflow.protocol.wire import DEFAULT_PORT
from agentflow.runtime.declared import (
    Fraction,
    SecondsOrZero,
    allowed_values,
    convert_checked,
    doc,
    plain_type,
)
from agentflow.server.config.api_address import ApiAddress
from agentflow.server.config.limits import HttpLimits, ServerLimits

NonEmptyText = Annotated[str, Meta(min_length=1)]
Amount = Annotated[float, Meta(gt=0, le=1_000_000)]
AmountOrZero = Annotated[float, Meta(ge=0, le=1_000_000)]
PriceValue = Annotated[float, Meta(ge=0, le=1_000_000)]
API_SETTINGS = (
    "api_key_variable",
    "flavour",
    "on_unsupported",
    "input_price",
    "output_price",
    "cached_price",
)
"""The keys of a model's own table that apply only to models behind an API."""
LogLevel = Literal["debug", "info", "warning", "error"]
SECRET = {"secret": True}
FILE = {"metavar": "FILE"}


class EngineConfig(EngineSettings, frozen=True, kw_only=True):
    """``[engine]``. A model's own table takes precedence over it."""

    memory_share: Annotated[
        Fraction, doc("fraction of the free memory for the weights and KV pools of all models")
    ] = 0.8
    served_model_names: Annotated[
        tuple[NonEmptyText, ...],
        doc("names that replace the name of the only model; the first is its main name"),
    ] = ()


class ModelConfig(EngineSettings, frozen=True, kw_only=True):
    """One model: ``[models.NAME]``. Missing settings come from ``[engine]``."""

    name: str
    path: Annotated[
        NonEmptyText, doc("a model's name, a folder, a GGUF file or an API's address (not set: NAME)")
    ]
    aliases: Annotated[tuple[NonEmptyText, ...], doc("more names of the model, on the same engine")] = ()
    api_key_variable: Annotated[
        NonEmptyText | None,
        doc("environment variable with the key of the model's API (not set: the vendor's)"),
    ] = None
    flavour: Annotated[
        Literal["vllm", "sglang", "llamacpp", "ollama", "generic"] | None,
        doc("kind of the server with OpenAI's API (not set: the server is asked at the start)"),
    ] = None
    on_unsupported: Annotated[
        Literal["error", "retry"] | None,
        doc("constraints that the API does not support: reject, or check and retry (not set: error)"),
    ] = None
    input_price: Annotated[
        PriceValue | None,
        doc("US dollars per million prompt tokens of the model's API (not set: the known price)"),
    ] = None
    output_price: Annotated[
        PriceValue | None, doc("US dollars per million output tokens, with input_price")
    ] = None
    cached_price: Annotated[
        PriceValue | None, doc("US dollars per million cached prompt tokens (not set: input_price)")
    ] = None

    @property
    def api(self) -> ApiAddress | None:
        """The address of the model's API; None if an engine of this server runs the model."""
        return ApiAddress.of(self.path, f"models.{self.name}")

    def engine_options(self) -> EngineOptions:
        """The options of the model's engine."""
        settings = {name: getattr(self, name) for name in EngineSettings.__struct_fields__}
        return EngineOptions(self.path, **settings)


class NetworkConfig(Struct, frozen=True, kw_only=True):
    """``[network]``: where the server listens, and which requests it accepts there."""

    host: Annotated[NonEmptyText, doc("address to listen on (0.0.0.0: reachable from other machines)")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(ge=0, le=65_535), doc("port to listen on (0: any free port)")] = DEFAULT_PORT
    tls_cert: Annotated[
        NonEmptyText | None,
        doc("certificate chain (PEM); the server then accepts only https and wss", **FILE),
    ] = None
    tls_key: Annotated[NonEmptyText | None, doc("the certificate's private key (PEM)", **FILE)] = None
    tls_key_password: Annotated[NonEmptyText | None, doc("password of the private key", **SECRET)] = None
    cors_origins: Annotated[
        tuple[NonEmptyText, ...],
        doc("origins whose pages may call the server, such as https://app.example (*: any)"),
    ] = ()
    allowed_hosts: Annotated[
        tuple[NonEmptyText, ...],
        doc("accepted Host names (not set: any; on loopback only its own, without keys only private ones)"),
    ] = ()
    image_hosts: Annotated[
        tuple[NonEmptyText, ...],
        doc("hosts of images and videos that the server fetches: a.example, *.a.example (not set: none)"),
    ] = ()
    allow_anonymous: Annotated[
        bool, doc("listen beyond this machine without API keys: every client can use the server")
    ] = False
    ui: Annotated[bool, doc("serve the page at /ui, and redirect browsers there from /")] = True


class AccessConfig(Struct, frozen=True, kw_only=True):
    """``[access]``: API keys. Without any, every client can use the server."""

    keys_file: Annotated[
        NonEmptyText | None, doc("API keys and tenants (TOML); `agentflow key` creates keys", **FILE)
    ] = None
    api_keys: Annotated[
        tuple[NonEmptyText, ...],
        doc("an API key with full access; other local users can see flags: prefer a file", **SECRET),
    ] = ()

    @property
    def keys_path(self) -> Path | None:
        """``keys_file``, expanded."""
        return None if self.keys_file is None else Path(self.keys_file).expanduser()


class StoresConfig(Struct, frozen=True, kw_only=True):
    """``[stores]``: where several servers keep responses, programs and limits."""

    redis_url: Annotated[
        NonEmptyText | None,
        doc(
            "Redis that several servers share: redis://:PASSWORD@HOST:6379/0 (not set: each keeps its own)",
            **SECRET,
        ),
    ] = None
    redis_prefix: Annotated[NonEmptyText, doc("prefix of all keys in Redis; the same on all servers")] = (
        "agentflow:"
    )
    front_name: Annotated[
        NonEmptyText | None,
        doc("this server's name among them, which is part of its ids (not set: a random one)"),
    ] = None


class ClusterConfig(Struct, frozen=True, kw_only=True):
    """``[cluster]``: the machines on which the engines run."""

    cluster: Annotated[
        Literal["local", "ray"], doc("where engines run: on this machine, or on the nodes of a Ray cluster")
    ] = "local"
    ray_address: Annotated[
        NonEmptyText | None,
        doc("HOST:PORT of Ray's head node (not set: the cluster that this machine belongs to)"),
    ] = None
    replica_cpus: Annotated[
        Amount | None, doc("CPUs that Ray reserves for an engine (not set: its threads, or 1)")
    ] = None
    replica_gpus: Annotated[
        AmountOrZero | None,
        doc("GPUs that Ray reserves for an engine; may be a fraction (not set: 1 if the cluster has GPUs)"),
    ] = None
    replica_memory_gib: Annotated[
        Amount | None, doc("memory that Ray reserves for an engine, in GiB (not set: none)")
    ] = None
    ray_wait_s: Annotated[
        SecondsOrZero, doc("how long to wait for room in the Ray cluster, such as for its autoscaler")
    ] = 20.0

    @property
    def unused(self) -> list[str]:
        """The given settings that only a Ray cluster uses, while engines run on this machine."""
        names = ("ray_address", "replica_cpus", "replica_gpus", "replica_memory_gib")
        return [name for name in names if self.cluster == "local" and getattr(self, name) is not None]

    def ray_options(self) -> RayOptions | None:
        """The placement of engines on a Ray cluster; None: they run on this machine."""
        if self.cluster == "local":
            return None
        return RayOptions(
            self.ray_address, self.replica_cpus, self.replica_gpus, self.replica_memory_gib, self.ray_wait_s
        )


class OverloadConfig(Struct, frozen=True, kw_only=True):
    """``[overload]``: when requests are rejected, and how the server shuts down."""

    max_wait_s: Annotated[
        SecondsOrZero, doc("reject requests (503) that would wait longer for their first token")
    ] = 60.0
    drain_s: Annotated[
        SecondsOrZero,
        doc("time for running requests to finish after SIGTERM before they are cancelled"),
    ] = DRAIN_S


class LogsConfig(Struct, frozen=True, kw_only=True):
    """``[logs]``: the log, and the record of the workload."""

    log_level: Annotated[LogLevel, doc("log level; the log goes to standard error")] = "info"
    log_format: Annotated[Literal["text", "json"], doc("plain lines, or one JSON object per line")] = "text"
    log_prompts: Annotated[bool, doc("log prompts and answers over HTTP, up to 20,000 bytes of each")] = False
    record_workload: Annotated[
        NonEmptyText | None,
        doc("record the workload, with prompts, in this new file (.jsonl, .jsonl.gz) for `simulate`", **FILE),
    ] = None

    @property
    def workload_path(self) -> Path | None:
        """``record_workload``, expanded."""
        return None if self.record_workload is None else Path(self.record_workload).expanduser()


class ServeConfig(Struct, frozen=True, kw_only=True):
    """The configuration of a server. ``models`` has at least one model; the first is the default model."""

    models: tuple[ModelConfig, ...]
    engine: EngineConfig = EngineConfig()
    network: NetworkConfig = NetworkConfig()
    access: AccessConfig = AccessConfig()
    stores: StoresConfig = StoresConfig()
    http_limits: HttpLimits = HttpLimits()
    server_limits: ServerLimits = ServerLimits()
    compile_limits: CompileLimits = CompileLimits()
    overload: OverloadConfig = OverloadConfig()
    cluster: ClusterConfig = ClusterConfig()
    logs: LogsConfig = LogsConfig()


@dataclass(frozen=True, slots=True)
class Section:
    """A field of ``ServeConfig``."""

    table: str  # in the file
    struct: type[Struct]
    prefix: str = ""  # the prefix of its settings' names


SECTIONS = {
    "engine": Section("engine", EngineConfig),
    "network": Section("network", NetworkConfig),
    "access": Section("access", AccessConfig),
    "stores": Section("stores", StoresConfig),
    "http_limits": Section("limits", HttpLimits),
    "server_limits": Section("limits", ServerLimits),
    "compile_limits": Section("limits", CompileLimits, "compile_"),
    "overload": Section("overload", OverloadConfig),
    "cluster": Section("cluster", ClusterConfig),
    "logs": Section("logs", LogsConfig),
}
TABLES = tuple(dict.fromkeys(section.table for section in SECTIONS.values()))
"""The tables of the file, without ``models``, in the order in which they are shown."""


VARIABLE_PREFIX = "AGENTFLOW_SERVE_"
# Longer values are truncated in error messages.
MAX_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting."""

    section: str  # the field of ``ServeConfig``
    field: str  # the field of the section's struct
    table: str  # in the file
    name: str  # the key in the table
    help: str
    default: Any
    type: Any  # the annotation
    kind: inspect.Type  # msgspec's view of the type, without None
    is_secret: bool
    metavar: str  # stands for the value in the help

    @property
    def is_list(self) -> bool:
        """Whether the setting has several values. Its flag can be repeated."""
        return isinstance(self.kind, inspect.VarTupleType)

    @property
    def is_switch(self) -> bool:
        """Whether the setting is a boolean."""
        return isinstance(self.kind, inspect.BoolType)

    @property
    def flag(self) -> str:
        """``--kv-tokens``. The flag of a list is singular: ``--api-key``."""
        return f"--{self._one.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """``AGENTFLOW_SERVE_KV_TOKENS``. The values of a list are separated by commas."""
        return VARIABLE_PREFIX + self._one.upper()

    @property
    def _one(self) -> str:
        return self.name.removesuffix("s") if self.is_list else self.name

    def from_text(self, text: str, where: str) -> Any:
        """Parses a flag or a variable. ``BadArgument``, whose message begins with ``where``, if it is
        invalid."""
        if self.is_list:
            return self.from_value([part.strip() for part in text.split(",") if part.strip()], where)
        return self._convert(text, where, strict=False)

    def from_value(self, value: Any, where: str) -> Any:
        """Converts the value of a key of the file, or of a repeated flag. ``BadArgument`` as above."""
        return self._convert(value, where, strict=True)

    def _convert(self, value: Any, where: str, *, strict: bool) -> Any:
        try:
            return convert_checked(value, self.type, strict=strict)
        except msgspec.ValidationError:
            message = f"{where} must be {allowed_values(self.kind)}"
            if not self.is_secret:
                shown = str(value).lower() if isinstance(value, bool) else repr(value)
                message += f", not {shown if len(shown) <= MAX_SHOWN else f'{shown[:MAX_SHOWN]}…'}"
            raise BadArgument(message) from None


def _list_settings(section: str, table: str, struct: type[Struct], prefix: str = "") -> Iterator[Setting]:
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        help_of = [meta for meta in getattr(hints[field.name], "__metadata__", ()) if meta.description]
        if not help_of:  # not a setting
            continue
        kind = plain_type(inspect.type_info(hints[field.name]))
        extra = help_of[0].extra or {}
        yield Setting(
            section=section,
            field=field.name,
            table=table,
            name=prefix + field.name,
            help=help_of[0].description,
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
    """The settings that have a flag and a variable, by name, in the order of the sections."""
    return _by_name(
        setting
        for name, section in SECTIONS.items()
        for setting in _list_settings(name, section.table, section.struct, section.prefix)
    )


@cache
def model_settings() -> dict[str, Setting]:
    """The keys of a model's own table, by name."""
    return _by_name(_list_settings("models", "models", ModelConfig))


@cache
def shared_names() -> tuple[str, ...]:
    """The keys that ``[engine]`` and a model's own table have in common."""
    return tuple(setting.name for setting in _list_settings("engine", "engine", EngineSettings))
