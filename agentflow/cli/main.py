"""The ``agentflow`` command. Each subcommand has a file of its own; here they are put together."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from agentflow.cli.command import Command
from agentflow.errors import AgentflowError
from agentflow.version import __version__

EXAMPLES = """\
a first session:
  agentflow pull                      fetch the default model (93 MB)
  agentflow chat                      talk to it
  agentflow serve                     let other programs use it
  agentflow COMMAND --help            all options of a command, with examples
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; its exit code. An error of agentflow's own is one line, not a traceback."""
    commands = {command.name: command for command in _commands()}
    parser = _parser(commands.values())
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return commands[options.command].run(options)
    except AgentflowError as error:
        print(f"agentflow: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(
            f"agentflow: `{options.command}` needs the package {error.name!r}: "
            "pip install 'agentflow-lm[engine,server]'",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("agentflow: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `agentflow models | head`: its reader has seen enough
        sys.stderr.close()  # or Python would complain about what it cannot flush
        return 141


def _commands() -> list[Command]:
    """In the order in which they are shown. All of them can be imported in a bare install."""
    from agentflow.cli import chat, config, keys, models, pull, replay, serve, simulate, top

    modules = (pull, models, chat, serve, config, keys, top, replay, simulate)
    return [module.COMMAND for module in modules]


def _parser(commands: Iterable[Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentflow",
        description="Programs that call language models many times, and their server.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"agentflow {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in commands:
        command.add_to(subparsers)
    return parser
