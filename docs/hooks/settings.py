"""An mkdocs hook that writes the tables of operating/settings.md from the schema of the server's settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentflow.runtime.declared import allowed_values
from agentflow.server.config.schema import (
    API_SETTINGS,
    TABLES,
    Setting,
    all_settings,
    model_settings,
    shared_names,
)

MARK = "<!-- settings -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the mark with one table for each table of the file."""
    return markdown.replace(MARK, "\n".join(_tables())) if MARK in markdown else markdown


def _tables() -> Iterator[str]:
    own = model_settings()
    shared = ", ".join(f"`{name}`" for name in shared_names())
    yield "## [models.NAME]\n"
    yield f"One table for each model. For one that the server runs it may have {shared}, which default to"
    yield "`[engine]`. Its other keys, which have neither flags nor variables, are:\n"
    yield "| key | value | meaning |"
    yield "|---|---|---|"
    for name, setting in own.items():
        if name not in shared_names():
            kind = "a [model behind an API](serving-apis.md): " if name in API_SETTINGS else ""
            yield f"| `{name}` | {allowed_values(setting.kind)} | {kind}{_words(setting)} |"
    yield ""
    for table in TABLES:
        yield f"## [{table}]\n"
        yield "| key, flag and variable | value | default | meaning |"
        yield "|---|---|---|---|"
        yield from (_row(setting) for setting in all_settings().values() if setting.table == table)
        yield ""


def _row(setting: Setting) -> str:
    names = f"`{setting.name}`<br>`{setting.flag}`<br>`{setting.variable}`"
    return f"| {names} | {allowed_values(setting.kind)} | {_default(setting)} | {_words(setting)} |"


def _words(setting: Setting) -> str:
    """The help. Angle brackets and bars would be markup."""
    return setting.help.replace("<", "&lt;").replace("|", "\\|")


def _default(setting: Setting) -> str:
    match setting.default:
        case None | ():
            return "not set"
        case bool(on):
            return "on" if on else "off"
        case int(number) if number >= 100_000:
            return f"{number:,}"
        case float(number):
            return f"{number:g}"
        case other:
            return f"`{other}`"
