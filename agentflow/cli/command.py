"""The definition of a subcommand of ``agentflow``. Each subcommand has its own file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. ``summary``: its line in ``agentflow --help``. ``description`` and ``examples``: for its
    own help. ``run`` returns the exit code. ``usage`` replaces the usage line of argparse."""

    name: str
    summary: str
    description: str
    examples: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    usage: str | None = None

    def add_to(
        self, commands: argparse._SubParsersAction[argparse.ArgumentParser]
    ) -> argparse.ArgumentParser:
        """Adds its parser, and returns it."""
        indented = "\n".join(f"  {line}" for line in self.examples.strip().splitlines())
        parser = commands.add_parser(
            self.name,
            usage=self.usage,
            help=self.summary,
            description=self.description.strip(),
            epilog=f"examples:\n{indented}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_options(parser)
        return parser


def take_positional(
    parser: argparse.ArgumentParser, options: argparse.Namespace, unknown: list[str]
) -> list[str]:
    """Adds arguments without a flag to the positional argument of a command that accepts several. Argparse
    ends it at the first flag: ``serve A --port 9000 B``. Returns the arguments that are still unknown."""
    several = [action.dest for action in parser._actions if action.nargs == "*"]
    if not several or any(text.startswith("-") for text in unknown):
        return unknown
    getattr(options, several[0]).extend(unknown)
    return []


def unknown_arguments(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """The error about arguments that a command does not have, with its options that are spelled alike."""
    options = [option for action in parser._actions for option in action.option_strings]
    name = next((text for text in unknown if text.startswith("-")), unknown[0]).partition("=")[0]
    close = get_close_matches(name, options, 1) if name.startswith("-") else []
    begins = [option for option in options if option.startswith("--") and name.startswith(f"{option}-")]
    advice = f" (did you mean {(begins or close)[0]}?)" if begins or close else ""
    return f"unrecognized arguments: {' '.join(unknown)}{advice}"


def printable(text: str) -> str:
    """Untrusted text without control characters, which a terminal would interpret."""
    return "".join(char if char.isprintable() else "·" for char in text)


def seconds_between(least_s: float, most_s: float) -> Callable[[str], float]:
    """The type of an option that is a number of seconds in this range."""

    def seconds(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least_s <= value <= most_s:
            raise argparse.ArgumentTypeError(
                f"must be a number of seconds from {least_s:g} to {most_s:g}, not {text!r}"
            )
        return value

    return seconds


def port_number(text: str) -> int:
    """The type of an option that is a port. 0: any free port."""
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, not {text!r}")
    return int(text)


def positive_int(text: str) -> int:
    """The type of an option that is an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, not {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value
