"""An mkdocs hook that writes the tables of operating/settings.md from the schema of the server's settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentflow.runtime.declared import allowed_values
from agentflow.server.config.schema import TABLES, Setting, all_settings, model_settings

MARK = "<!-- settings -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the mark with one table for each table of the file."""
    return markdown.replace(MARK, "\n".join(_tables())) if MARK in markdown else markdown


def _tables() -> Iterator[str]:
    own = ", ".join(f"`{name}`" for name in model_settings())
    yield "## [models.NAME]\n"
    yield f"One table for each model. Its keys are {own}. All but `path` default to `[engine]`.\n"
    for table in TABLES:
        yield f"## [{table}]\n"
        yield "| key, flag and variable | value | default | meaning |"
        yield "|---|---|---|---|"
        yield from (_row(setting) for setting in all_settings().values() if setting.table == table)
        yield ""


def _row(setting: Setting) -> str:
    names = f"`{setting.name}`<br>`{setting.flag}`<br>`{setting.variable}`"
    # Angle brackets and bars would be markup.
    words = setting.help.replace("<", "&lt;").replace("|", "\\|")
    return f"| {names} | {allowed_values(setting.kind)} | {_default(setting)} | {words} |"


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
