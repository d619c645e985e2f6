"""A configuration as TOML that says of each key where its value is from; it can be given back as a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from agentflow.server.config.config import Effective
from agentflow.server.config.config_file import MODELS
from agentflow.server.config.config_setting import Setting, all_settings
from agentflow.server.config.schema import GROUPS

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
