"""Loads the configuration of a server from flags, environment variables and a TOML file, and prints it.

The first of these sources that has a setting takes precedence, then its default. A model's own table in the
file takes precedence over all three. Commands use ``add_config_flags`` and ``read_flags``, ``load_config``
combines the sources, and ``config_text`` writes a configuration as TOML with the source of each value; the
text is again a valid file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentflow.engine.store.hub_names import served_name
from agentflow.errors import BadArgument
from agentflow.protocol.wire import DEFAULT_MODEL
from agentflow.server.addresses import is_loopback
from agentflow.server.config.api_address import ApiAddress
from agentflow.server.config.schema import (
    API_SETTINGS,
    SECTIONS,
    TABLES,
    VARIABLE_PREFIX,
    EngineConfig,
    ModelConfig,
    ServeConfig,
    Setting,
    all_settings,
    model_settings,
    shared_names,
)

MODELS = "models"


@dataclass(frozen=True)
class FileValues:
    """The configuration file."""

    values: dict[str, Any] = field(default_factory=dict)  # the settings, by name
    models: dict[str, dict[str, Any]] = field(default_factory=dict)  # each model's own table


def read_config_file(path: Path) -> FileValues:
    """Reads and checks the file. ``BadArgument``, with a message of one line, for an unreadable file or an
    invalid key."""
    found = FileValues()
    for table, values in _tables(path).items():
        if table == MODELS:
            for name, own in _table(path, MODELS, values).items():
                known = model_settings()
                section = f"{MODELS}.{name}"
                found.models[name] = _values(path, section, _table(path, section, own), known)
        elif table in TABLES:
            known = {name: one for name, one in all_settings().items() if one.table == table}
            found.values.update(_values(path, table, _table(path, table, values), known))
        else:
            raise BadArgument(f"{path}: {_unknown_table(table)}")
    return found


def _tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadArgument(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadArgument(f"{path} is not UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise BadArgument(f"{path} is not valid TOML: {error}") from error


def _table(path: Path, section: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadArgument(f"{path}: {section} must be a table: write [{section}], and its keys below")
    return value


def _values(path: Path, section: str, table: dict[str, Any], known: dict[str, Setting]) -> dict[str, Any]:
    for name in table:
        if name not in known:
            raise BadArgument(f"{path}: [{section}] has no key {name!r}{_hint(name, known)}")
    return {name: known[name].from_value(value, f"{path}: {section}.{name}") for name, value in table.items()}


def _hint(name: str, known: Iterable[str]) -> str:
    near = near_match(name, known)
    elsewhere = all_settings().get(name)
    if near is None and elsewhere is not None:
        return f": it belongs in [{elsewhere.table}]"
    return f": did you mean {near!r}?" if near else f" (its keys: {', '.join(known)})"


def _unknown_table(name: str) -> str:
    tables = [MODELS, *TABLES]
    if name in all_settings():
        return f"{name!r} is outside a table: it belongs in [{all_settings()[name].table}]"
    near = near_match(name, tables)
    return f"there is no table [{name}]" + (
        f": did you mean [{near}]?" if near else f" (tables: {', '.join(tables)})"
    )


def near_match(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar; None if no name is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


MODEL_FLAG, MODEL_VARIABLE = "--model", f"{VARIABLE_PREFIX}MODEL"
FILE_VARIABLE = f"{VARIABLE_PREFIX}CONFIG"


@dataclass(frozen=True)
class Flags:
    """The command line."""

    values: Mapping[str, str | list[str] | bool]  # the given settings, by name
    models: tuple[str, ...] = ()  # each ``NAME`` or ``NAME=PATH``
    file: str | None = None


@dataclass(frozen=True)
class Effective:
    """A configuration with its sources."""

    config: ServeConfig
    sources: dict[str, str]  # the source of each setting, such as ``flag --port`` or ``default``
    own: dict[str, dict[str, Any]]  # each model's own table
    models_source: str  # the source of the list of models


def load_config(flags: Flags, environment: Mapping[str, str]) -> Effective:
    """Returns the effective configuration. ``BadArgument`` for an invalid flag, variable, or key of the file,
    with a message of one line.

    >>> load_config(Flags({"port": "9000"}), os.environ).config.network.port
    9000
    """
    # Compose files pass unset variables on as empty ones.
    given = {name: text for name, text in environment.items() if text and name.startswith(VARIABLE_PREFIX)}
    _check_names(given)
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
    fields: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, value in values.items():
        setting = all_settings()[name]
        fields[setting.section][setting.field] = value
    sections: dict[str, Any] = {name: SECTIONS[name].struct(**fields[name]) for name in SECTIONS}
    models, own, models_source = _models(flags, given, file, path, sections["engine"])
    config = ServeConfig(models=models, **sections)
    _check(config)
    return Effective(config, sources, own, models_source)


def _check_names(given: Mapping[str, str]) -> None:
    known = [MODEL_VARIABLE, FILE_VARIABLE, *(setting.variable for setting in all_settings().values())]
    ends = [name.removeprefix(VARIABLE_PREFIX) for name in known]
    for name in given:
        if name not in known:
            near = near_match(name.removeprefix(VARIABLE_PREFIX), ends)
            hint = "`agentflow serve --help` lists the settings"
            if near:
                hint = f"did you mean {VARIABLE_PREFIX}{near}?"
            raise BadArgument(f"the environment variable {name} is not a setting: {hint}")


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
            return setting.from_value(texts, setting.flag), f"flag {setting.flag}"


def _from_variable(given: Mapping[str, str], name: str) -> tuple[Any, str] | None:
    setting = all_settings()[name]
    text = given.get(setting.variable)
    if text is None:
        return None
    return setting.from_text(text, setting.variable), f"environment {setting.variable}"


def _models(
    flags: Flags, given: Mapping[str, str], file: FileValues, path: str | None, engine: EngineConfig
) -> tuple[tuple[ModelConfig, ...], dict[str, dict[str, Any]], str]:
    """Returns the models, the settings of each model's own table, and the source of the list of models.

    The list comes from the first source that has one, and the settings from the tables of the file.
    """
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
            raise BadArgument(f"{where} has the model {name!r} twice: write NAME=PATH to rename one")
        own[name] = {**file.models.get(name, {}), **({"path": model_path} if model_path else {})}
    if not own:
        raise BadArgument(f"{where} has no model")
    shared = {name: getattr(engine, name) for name in shared_names()}
    if engine.served_model_names:
        own = _renamed(own, engine.served_model_names)
    models = tuple(ModelConfig(name=name, **{"path": name, **shared, **table}) for name, table in own.items())
    for model in models:
        _check_model(model, own[model.name])
    names = Counter(name for model in models for name in (model.name, *model.aliases))
    for name, count in names.items():
        if count > 1:
            raise BadArgument(f"the model name {name!r} is used more than once", param=name)
    return models, own, source


def _renamed(own: Mapping[str, dict[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Renames the only model to the first of the names, and adds the others as aliases."""
    if len(own) > 1:
        raise BadArgument(
            "served_model_names replaces the name of a single model, and there are several: write "
            "--model NAME=PATH",
            param="served_model_names",
        )
    [(name, table)] = own.items()
    aliases = [*names[1:], *(one for one in table.get("aliases", ()) if one not in names)]
    return {names[0]: {"path": name, **table, "aliases": tuple(aliases)}}


def _named(text: str, where: str) -> tuple[str, str | None]:
    """Splits ``NAME`` or ``NAME=PATH`` into name and path. The name of a path alone is its last part."""
    name, equals, path = text.partition("=")
    if equals and name and path and "/" not in name:
        return name, path
    if not text or (equals and (not name or not path)):
        raise BadArgument(f"{where} must be NAME or NAME=PATH, not {text!r}")
    address = ApiAddress.of(text, where)
    if address is not None and address.served_name is None:
        raise BadArgument(f"{where} has no model name: write NAME=http://HOST:PORT/v1, or append #MODEL")
    own = served_name(text) if address is None else str(address.served_name)
    return own, None if own == text else text


def _check_model(model: ModelConfig, own: Mapping[str, Any]) -> None:
    """Checks that the settings of a model's own table apply to its kind of model, and fit together."""
    is_api = model.api is not None
    for name in own:
        if is_api and name in shared_names():
            kind, other = "models that this server runs", "is behind an API"
        elif not is_api and name in API_SETTINGS:
            kind, other = "models behind an API", "is run by this server"
        else:
            continue
        raise BadArgument(f"models.{model.name}: {name} is for {kind}, and this one {other}", param=name)
    if model.flavour is not None and model.api is not None and model.api.vendor != "compatible":
        raise BadArgument(
            f"models.{model.name}: flavour is for http://… addresses, and is known for {model.path}",
            param="flavour",
        )
    if (model.input_price is None) != (model.output_price is None):
        missing = "output_price" if model.output_price is None else "input_price"
        raise BadArgument(f"models.{model.name}: {missing} is not set: give both prices", param=missing)
    if model.input_price is None and model.cached_price is not None:
        raise BadArgument(f"models.{model.name}: cached_price needs input_price", param="input_price")
    if model.api is not None and model.input_price is not None and model.api.model is None:
        raise BadArgument(f"models.{model.name}: a price needs the model: add #MODEL to path", param="path")


def _check(config: ServeConfig) -> None:
    """Checks that span several settings."""
    network, access = config.network, config.access
    if (network.tls_cert is None) != (network.tls_key is None):
        missing = "tls_key" if network.tls_key is None else "tls_cert"
        raise BadArgument(f"{missing} is not set: TLS needs a certificate and its key")
    if network.tls_key_password is not None and network.tls_key is None:
        raise BadArgument("tls_key_password is set without tls_key")
    for name, path in (
        ("tls_cert", network.tls_cert),
        ("tls_key", network.tls_key),
        ("keys_file", access.keys_file),
    ):
        if path is not None and not Path(path).expanduser().is_file():
            is_folder = Path(path).expanduser().is_dir()
            raise BadArgument(f"{name}: {path} is a folder" if is_folder else f"{name}: no such file: {path}")
    has_keys = bool(access.api_keys) or access.keys_file is not None
    if not (has_keys or network.allow_anonymous or is_loopback(network.host)):
        raise BadArgument(
            f"host {network.host} is reachable from other machines, and there are no API keys: set "
            "--keys-file (`agentflow key` creates keys), or --allow-anonymous to accept every client"
        )


_TITLES = {
    "engine": "engine (for all models; a model's own table in the file takes precedence)",
    "access": "access (without API keys, every client can use the server)",
    "stores": "stores (data that several servers share, and that survives the loss of one)",
}


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting, grouped by table."""
    first = parser.add_argument_group("models")
    first.add_argument(
        "models", nargs="*", metavar="MODEL", help="the same as --model; several stand side by side"
    )
    first.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="a model's name (short, or OWNER/NAME on the hub), its folder or GGUF file, the address of a "
        "model behind an API (openai:MODEL, anthropic:MODEL, http://HOST/v1#MODEL), or one of these under a "
        f"name of your choice; can be repeated; the first is the default model (default: {DEFAULT_MODEL})",
    )
    first.add_argument(
        "--config",
        metavar="FILE",
        help=f"a TOML file with settings; also {FILE_VARIABLE} (see docs/operating/serving.md)",
    )
    for table in TABLES:
        section = parser.add_argument_group(_TITLES.get(table, table))
        for setting in all_settings().values():
            if setting.table == table:
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
            help=text + ("; can be repeated" if setting.is_list else _default(setting)),
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
    """Returns the effective configuration of this process. ``BadArgument`` if it is invalid."""
    values = {name: value for name, value in vars(options).items() if name in all_settings()}
    return load_config(Flags(values, (*options.models, *options.model), options.config), os.environ)


# The column where comments begin, after shorter lines.
COMMENT_COLUMN = 34

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def config_text(effective: Effective) -> str:
    """Writes the whole configuration as TOML. A secret becomes a comment without its value.

    >>> print(config_text(effective))
    [models.smollm2-135m]             # default
    path = "smollm2-135m"
    ...
    """
    return "\n".join([*_model_lines(effective), *_table_lines(effective)]) + "\n"


def _model_lines(effective: Effective) -> Iterator[str]:
    for number, model in enumerate(effective.config.models):
        first = ", the default model" if number == 0 and len(effective.own) > 1 else ""
        yield _commented(f"[{MODELS}.{_key(model.name)}]", effective.models_source + first)
        own = effective.own[model.name]
        yield f"path = {_value(model.path)}"
        yield from (f"{name} = {_value(value)}" for name, value in own.items() if name != "path")
        yield ""


def _table_lines(effective: Effective) -> Iterator[str]:
    for table in TABLES:
        yield f"[{table}]"
        for setting in all_settings().values():
            if setting.table == table:
                value = getattr(getattr(effective.config, setting.section), setting.field)
                yield _setting_line(setting, value, effective.sources[setting.name])
        if table != TABLES[-1]:
            yield ""


def _setting_line(setting: Setting, value: Any, source: str) -> str:
    if value is None:
        return _commented(f"# {setting.name}", "not set")
    if setting.is_secret and value:
        hidden = [HIDDEN] * len(value) if setting.is_list else HIDDEN
        return _commented(f"# {setting.name} = {_value(hidden)}", f"{source}; a secret, set it again")
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
        case str():  # TOML has JSON's escapes, and requires one more
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            return repr(value)
