"""The ``agentflow`` command, which runs the subcommands of the other files."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterable, Sequence

from agentflow.cli.command import Command, take_positional, unknown_arguments
from agentflow.errors import AgentflowError, BadArgument
from agentflow.version import __version__

EXAMPLES = """\
a first session:
  agentflow doctor                    check this machine
  agentflow up                        the server and its page, in the browser
  agentflow chat                      talk to the model in the terminal
  agentflow serve                     let other programs use it
  agentflow COMMAND --help            all options of a command, with examples
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. Errors of agentflow are printed as one line. An invalid
    argument or setting exits with 2, as in argparse."""
    _prepare_streams()
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except AgentflowError as error:
        print(f"agentflow: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadArgument) else 1
    except KeyboardInterrupt:
        print("agentflow: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `agentflow models | head`
        _discard_output()
        return 141
    except OSError as error:  # such as a full disk
        print(f"agentflow: {error}", file=sys.stderr)
        _discard_output()
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    commands = {command.name: command for command in _commands()}
    parser, subparsers = _parsers(commands.values())
    options, unknown = parser.parse_known_args(arguments)
    if unknown and options.command is not None:
        unknown = take_positional(subparsers[options.command], options, unknown)
    if unknown:
        failed = subparsers.get(options.command, parser)
        failed.error(unknown_arguments(failed, unknown))
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return commands[options.command].run(options)
    except ImportError as error:
        print(
            f"agentflow: `{options.command}` needs the package {error.name!r}: "
            "pip install 'agentflow-lm[engine,server]' ([server,api] if all models are behind an API)",
            file=sys.stderr,
        )
        return 1


def _prepare_streams() -> None:
    """Files and pipes are UTF-8 in any locale, unless PYTHONIOENCODING has another encoding. A character that
    a terminal lacks is shown as a question mark. Closed streams are replaced by the null device."""
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            null = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115  (until the end)
            setattr(sys, name, null)
        elif isinstance(stream, io.TextIOWrapper):
            is_input_file = name == "stdin" and not stream.isatty()
            stream.reconfigure(
                encoding=None if encoding or stream.isatty() else "utf-8",
                errors=errors or ("strict" if is_input_file else "replace"),
            )


def _discard_output() -> None:
    """Keeps Python from reporting at its exit that the rest of the output could not be written."""
    with contextlib.suppress(OSError):  # not a file, as in tests
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _commands() -> list[Command]:
    """The commands, in the order of the help. A bare install can import all of them."""
    from agentflow.cli import chat, doctor, models, pull, replay, run
    from agentflow.cli.operating import config, keys, route, serve, simulate, top, up, watch

    modules = (doctor, up, pull, models, chat, run, serve, route, config, keys, top, watch, replay, simulate)
    return [module.COMMAND for module in modules]


def _parsers(
    commands: Iterable[Command],
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of all commands, and the parser of each."""
    parser = argparse.ArgumentParser(
        prog="agentflow",
        description="Programs that call language models many times, and their server.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"agentflow {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    return parser, {command.name: command.add_to(subparsers) for command in commands}
