"""The flags of ``agentflow serve`` and ``agentflow config``: one for each setting of the schema."""

from __future__ import annotations

import argparse
import os
import sys

from agentflow.errors import BadArgument
from agentflow.server.config.config import FILE_VARIABLE, Effective, Flags, load_config
from agentflow.server.config.config_setting import Setting, all_settings
from agentflow.server.config.schema import DEFAULT_MODEL, GROUPS

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
        help=f"a TOML file with settings; also {FILE_VARIABLE} (see docs/serving.md)",
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
