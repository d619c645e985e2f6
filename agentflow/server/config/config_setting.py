"""One setting of the schema: its flag, its variable, its key, and how a value for it is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

from agentflow.errors import BadArgument
from agentflow.server.config.schema import GROUPS, EngineSettings, ModelConfig

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
