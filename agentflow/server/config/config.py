"""The configuration of a server, from flags, environment variables, and a file: in this order, the first that
says something holds, and the default where none does.

A model's own table in the file comes before all of them: it is about that model, and they are about all.

The TOML file of a server's configuration: what it says, checked key by key.

The flags of ``agentflow serve`` and ``agentflow config``: one for each setting of the schema.

A configuration as TOML that says of each key where its value is from; it can be given back as a file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct

from agentflow.errors import BadArgument
from agentflow.server.config.schema import (
    DEFAULT_MODEL,
    GROUPS,
    VARIABLE_PREFIX,
    ModelConfig,
    ServeConfig,
    Setting,
    all_settings,
    model_settings,
    shared_names,
)
from agentflow.server.http.addresses import is_loopback

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


MODEL_FLAG, MODEL_VARIABLE = "--model", f"{VARIABLE_PREFIX}MODEL"
FILE_FLAG, FILE_VARIABLE = "--config", f"{VARIABLE_PREFIX}CONFIG"


@dataclass(frozen=True)
class Flags:
    """What the command line says. ``values``: of settings that were given, by name: a text, a list of texts,
    or whether a switch is on. ``models``: ``NAME`` or ``NAME=PATH`` each."""

    values: Mapping[str, str | list[str] | bool]
    models: tuple[str, ...] = ()
    file: str | None = None


@dataclass(frozen=True)
class Effective:
    """A configuration and where it is from. ``sources``: of each setting, such as ``flag --port`` or
    ``default``. ``own``: what each model's own table says; ``models_source``: who named the models."""

    config: ServeConfig
    sources: dict[str, str]
    own: dict[str, dict[str, Any]]
    models_source: str


def load_config(flags: Flags, environment: Mapping[str, str]) -> Effective:
    """The configuration that holds. ``BadArgument``, in one line that names the flag, the variable, or the
    file and its key, where something is wrong.

    >>> load_config(Flags({"port": "9000"}), os.environ).config.network.port
    9000
    """
    # An empty variable says nothing: compose files pass those on that are not set.
    given = {name: text for name, text in environment.items() if text and name.startswith(VARIABLE_PREFIX)}
    _refuse_unknown(given)
    path = flags.file or given.get(FILE_VARIABLE)
    file = read_config_file(Path(path).expanduser()) if path is not None else FileValues()
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in all_settings():
        found = _from_flag(flags, name) or _from_variable(given, name)
        if found is None and name in file.values:
            found = file.values[name], f"file {path}"
        if found is not None:
            values[name], sources[name] = found
        else:
            sources[name] = "default"
    groups: dict[str, Any] = {
        group: struct(
            **{name: value for name, value in values.items() if all_settings()[name].group == group}
        )
        for group, struct in GROUPS.items()
    }
    models, own, models_source = _models(flags, given, file, path, groups["engine"])
    config = ServeConfig(models=models, **groups)
    _check(config)
    return Effective(config, sources, own, models_source)


def _refuse_unknown(given: Mapping[str, str]) -> None:
    known = [MODEL_VARIABLE, FILE_VARIABLE, *(setting.variable for setting in all_settings().values())]
    for name in given:
        if name not in known:
            near = near_match(name, known)
            hint = f": did you mean {near}?" if near else ": `agentflow serve --help` lists the settings"
            raise BadArgument(f"the environment variable {name} is no setting of the server{hint}")


def _from_flag(flags: Flags, name: str) -> tuple[Any, str] | None:
    setting = all_settings()[name]
    match flags.values.get(name):
        case None:
            return None
        case bool(value):
            return value, f"flag {setting.flag if value else setting.flag.replace('--', '--no-', 1)}"
        case str(text):
            return setting.from_text(text, setting.flag), f"flag {setting.flag}"
        case texts:
            return setting.from_values(texts, setting.flag), f"flag {setting.flag}"


def _from_variable(given: Mapping[str, str], name: str) -> tuple[Any, str] | None:
    setting = all_settings()[name]
    text = given.get(setting.variable)
    if text is None:
        return None
    return setting.from_text(text, setting.variable), f"environment {setting.variable}"


def _models(
    flags: Flags, given: Mapping[str, str], file: FileValues, path: str | None, engine: Struct
) -> tuple[tuple[ModelConfig, ...], dict[str, dict[str, Any]], str]:
    """The models, what is their own, and who named them. Whoever names models first says which there are;
    the tables of the file say how they are run."""
    texts: tuple[str, ...]
    if flags.models:
        texts, where, source = flags.models, MODEL_FLAG, f"flag {MODEL_FLAG}"
    elif MODEL_VARIABLE in given:
        texts = tuple(part.strip() for part in given[MODEL_VARIABLE].split(",") if part.strip())
        where, source = MODEL_VARIABLE, f"environment {MODEL_VARIABLE}"
    elif file.models:
        texts, where, source = (), str(path), f"file {path}"
    else:
        texts, where, source = (DEFAULT_MODEL,), "the default", "default"
    own: dict[str, dict[str, Any]] = {} if texts else dict(file.models)
    for text in texts:
        name, model_path = _named(text, where)
        if name in own:
            raise BadArgument(f"{where} names the model {name!r} twice: write NAME=PATH to tell them apart")
        own[name] = {**file.models.get(name, {}), **({"path": model_path} if model_path else {})}
    if not own:
        raise BadArgument(f"{where} names no model")
    shared = {name: getattr(engine, name) for name in shared_names()}
    models = tuple(ModelConfig(name=name, **{"path": name, **shared, **table}) for name, table in own.items())
    return models, own, source


def _named(text: str, where: str) -> tuple[str, str | None]:
    """``NAME`` or ``NAME=PATH``; a path alone is named by its last folder."""
    name, equals, path = text.partition("=")
    if equals and name and path and "/" not in name:
        return name, path
    if not text or (equals and (not name or not path)):
        raise BadArgument(f"{where} must be NAME or NAME=PATH, not {text!r}")
    if os.sep in text or text in (".", ".."):
        return Path(text).expanduser().resolve().name or text, text
    return text, None


def _check(config: ServeConfig) -> None:
    """What settings must have in common."""
    network, access = config.network, config.access
    if (network.tls_cert is None) != (network.tls_key is None):
        missing = "tls_key" if network.tls_key is None else "tls_cert"
        raise BadArgument(f"{missing} is missing: TLS needs both a certificate and its key")
    if network.tls_key_password is not None and network.tls_key is None:
        raise BadArgument("tls_key_password is given without tls_key: name the key that it opens")
    for name, path in (
        ("tls_cert", network.tls_cert),
        ("tls_key", network.tls_key),
        ("keys_file", access.keys_file),
    ):
        if path is not None and not Path(path).expanduser().is_file():
            raise BadArgument(f"{name}: there is no file {path}")
    has_keys = bool(access.api_keys) or access.keys_file is not None
    if not (has_keys or network.allow_anonymous or is_loopback(network.host)):
        raise BadArgument(
            f"host {network.host} can be reached from other machines, and there are no keys: give "
            "--keys-file (`agentflow key` makes keys), or --allow-anonymous to let everybody in"
        )


_TITLES = {
    "engine": "engine (for all models; a model's own table in the file comes first)",
    "access": "access (without keys, everybody who reaches the server may use it)",
}


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them, in groups. They are read by ``read_flags``."""
    first = parser.add_argument_group("models")
    first.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="a pulled model, a Hugging Face folder, or a folder under a name of your choice; may be "
        f"repeated; sessions that name none get the first (default: {DEFAULT_MODEL})",
    )
    first.add_argument(
        "--config",
        metavar="FILE",
        help=f"a TOML file with settings; also {FILE_VARIABLE} (see docs/operating/serving.md)",
    )
    for group in GROUPS:
        section = parser.add_argument_group(_TITLES.get(group, group))
        for setting in all_settings().values():
            if setting.group == group:
                _add_flag(section, setting)


def _add_flag(section: argparse._ArgumentGroup, setting: Setting) -> None:
    text = setting.help.replace("%", "%%")
    if setting.is_switch:
        section.add_argument(
            setting.flag,
            dest=setting.name,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=f"{text} (default: {'on' if setting.default else 'off'})",
        )
    else:
        section.add_argument(
            setting.flag,
            dest=setting.name,
            action="append" if setting.is_list else "store",
            default=argparse.SUPPRESS,
            metavar=setting.metavar,
            help=text + ("; may be repeated" if setting.is_list else _default(setting)),
        )


def _default(setting: Setting) -> str:
    if setting.default is None:
        return ""
    shown = setting.default
    if isinstance(shown, float):
        shown = f"{shown:g}"
    elif isinstance(shown, int) and shown >= 100_000:
        shown = f"{shown:,}"
    return f" (default: {shown})"


def read_flags(options: argparse.Namespace) -> Effective:
    """The configuration that flags, this process's environment and the file make. Ends the process with 2
    and one line where something is wrong, as argparse does."""
    values = {name: value for name, value in vars(options).items() if name in all_settings()}
    try:
        return load_config(Flags(values, tuple(options.model), options.config), os.environ)
    except BadArgument as error:
        print(f"agentflow: {error}", file=sys.stderr)
        raise SystemExit(2) from None


# Where the comments begin, unless what is before them is longer.
COMMENT_COLUMN = 34

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def config_text(effective: Effective) -> str:
    """The whole configuration. A secret's line is a comment, and does not tell it.

    >>> print(config_text(effective))
    [models.smollm2-135m]             # default
    path = "smollm2-135m"
    ...
    """
    return "\n".join([*_model_lines(effective), *_group_lines(effective)]) + "\n"


def _model_lines(effective: Effective) -> Iterator[str]:
    for number, model in enumerate(effective.config.models):
        first = ", of sessions that name no model" if number == 0 and len(effective.own) > 1 else ""
        yield _commented(f"[{MODELS}.{_key(model.name)}]", effective.models_source + first)
        own = effective.own[model.name]
        yield f"path = {_value(model.path)}"
        yield from (f"{name} = {_value(value)}" for name, value in own.items() if name != "path")
        yield ""


def _group_lines(effective: Effective) -> Iterator[str]:
    for group in GROUPS:
        yield f"[{group}]"
        values = getattr(effective.config, group)
        for setting in all_settings().values():
            if setting.group == group:
                yield _setting_line(setting, getattr(values, setting.name), effective.sources[setting.name])
        if group != list(GROUPS)[-1]:
            yield ""


def _setting_line(setting: Setting, value: Any, source: str) -> str:
    if value is None:
        return _commented(f"# {setting.name}", "not set")
    if setting.is_secret and value:
        hidden = [HIDDEN] * len(value) if setting.is_list else HIDDEN
        return _commented(f"# {setting.name} = {_value(hidden)}", f"{source}; secret, so give it again")
    return _commented(f"{setting.name} = {_value(value)}", source)


HIDDEN = "***"


def _commented(text: str, comment: str) -> str:
    return f"{text:<{COMMENT_COLUMN - 1}} # {comment}"


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _value(name)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():  # JSON's escapes are TOML's; of the rest, TOML wants one more escaped
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            return repr(value)
