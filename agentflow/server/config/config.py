"""The configuration of a server, from flags, environment variables, and a file: in this order, the first that
says something holds, and the default where none does.

A model's own table in the file comes before all of them: it is about that model, and they are about all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from agentflow.errors import BadArgument
from agentflow.server.config.config_file import FileValues, near_match, read_config_file
from agentflow.server.config.config_setting import VARIABLE_PREFIX, all_settings, shared_names
from agentflow.server.config.schema import DEFAULT_MODEL, GROUPS, ModelConfig, ServeConfig
from agentflow.server.http.addresses import is_loopback

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
