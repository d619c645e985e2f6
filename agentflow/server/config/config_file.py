"""The TOML file of a server's configuration: what it says, checked key by key."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentflow.errors import BadArgument
from agentflow.server.config.config_setting import Setting, all_settings, model_settings
from agentflow.server.config.schema import GROUPS

MODELS = "models"


@dataclass(frozen=True)
class FileValues:
    """``values``: of the settings that the file names. ``models``: each model's own table."""

    values: dict[str, Any] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_config_file(path: Path) -> FileValues:
    """``BadArgument``, in one line, for a file that cannot be read or says what it should not."""
    found = FileValues()
    for group, table in _tables(path).items():
        if group == MODELS:
            for name, own in _table(path, MODELS, table).items():
                known = model_settings()
                place = f"{MODELS}.{name}"
                found.models[name] = _values(path, place, _table(path, place, own), known)
        elif group in GROUPS:
            known = {name: one for name, one in all_settings().items() if one.group == group}
            found.values.update(_values(path, group, _table(path, group, table), known))
        else:
            raise BadArgument(f"{path}: {_unknown_table(group)}")
    return found


def _tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadArgument(f"the configuration {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadArgument(f"{path} is no text in UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise BadArgument(f"{path} is no valid TOML: {error}") from error


def _table(path: Path, place: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadArgument(f"{path}: {place} must be a table: write [{place}] and its keys below it")
    return value


def _values(path: Path, place: str, table: dict[str, Any], known: dict[str, Setting]) -> dict[str, Any]:
    for name in table:
        if name not in known:
            raise BadArgument(f"{path}: [{place}] has no key {name!r}{_hint(name, known)}")
    return {name: known[name].from_toml(value, f"{path}: {place}.{name}") for name, value in table.items()}


def _hint(name: str, known: Iterable[str]) -> str:
    near = near_match(name, known)
    elsewhere = all_settings().get(name)
    if near is None and elsewhere is not None:
        return f": it belongs in [{elsewhere.group}]"
    return f": did you mean {near!r}?" if near else f" (it has: {', '.join(known)})"


def _unknown_table(name: str) -> str:
    groups = [MODELS, *GROUPS]
    if name in all_settings():
        return f"{name!r} stands in no table: it belongs in [{all_settings()[name].group}]"
    near = near_match(name, groups)
    return f"there is no table [{name}]" + (
        f": did you mean [{near}]?" if near else f" (there are: {', '.join(groups)})"
    )


def near_match(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like it, if one does."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)
