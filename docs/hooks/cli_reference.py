"""An mkdocs hook that writes reference/cli.md's commands from the parsers of ``agentflow``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

from agentflow.cli.main import _commands, _parsers

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces the mark with one section for each command."""
    if MARK not in markdown:
        return markdown
    return markdown.replace(MARK, "\n".join(_sections()))


def _sections() -> Iterator[str]:
    for name, parser in _parsers(_commands())[1].items():
        yield f"## agentflow {name}\n"
        yield f"{_text(parser.description)}\n"
        yield f"```console\n$ {_usage(parser)}\n```\n"
        for group in parser._action_groups:
            actions = [
                action
                for action in group._group_actions
                if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
            ]
            if actions:
                yield from _table(group.title or "", actions)
        if parser.epilog:
            examples = "\n".join(line.strip() for line in parser.epilog.splitlines()[1:])
            yield f'```console title="Examples"\n{examples}\n```\n'


def _table(title: str, actions: list[argparse.Action]) -> Iterator[str]:
    yield f"| {title} | |"
    yield "|---|---|"
    for action in actions:
        names = ", ".join(f"`{name}`" for name in action.option_strings)
        if not action.option_strings:
            names = f"`{action.metavar or action.dest}`"
        elif action.nargs != 0:
            choices = "|".join(map(str, action.choices or ()))
            names += f" `{action.metavar or choices or action.dest.upper()}`"
        words = action.help or ""
        # argparse fills in %(default)s and the like.
        words = words % {**vars(action), "prog": "agentflow"} if "%" in words else words
        yield f"| {names.replace('|', chr(92) + '|')} | {_text(words).replace('|', chr(92) + '|')} |"
    yield ""


def _usage(parser: argparse.ArgumentParser) -> str:
    usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
    # The tables below list the options.
    required = re.sub(r" \[-[^\]]*\]", "", usage)
    return required.replace(f"{parser.prog}", f"{parser.prog} [OPTIONS]", 1) if required != usage else usage


def _text(words: str | None) -> str:
    """Brackets and stars are text."""
    return re.sub(r"([<*_\[])", r"\\\1", " ".join((words or "").split()))
