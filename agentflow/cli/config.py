"""``agentflow config``: shows the configuration that ``agentflow serve`` would run with."""

from __future__ import annotations

import argparse

from agentflow.cli.command import Command
from agentflow.server.config.config import add_config_flags, config_text, read_flags


def _run(options: argparse.Namespace) -> int:
    print(config_text(read_flags(options)), end="")
    return 0


COMMAND = Command(
    name="config",
    usage="agentflow config [the options of `agentflow serve`]",
    summary="show the configuration that `serve` would run with",
    description="""\
Shows every setting that `agentflow serve` would run with, and where it is
from: a flag, the environment, the file, or the default. What it prints is a
configuration file; keys and passwords are left out.""",
    examples="""\
agentflow config                     all settings and their defaults
agentflow config > server.toml       a file to start from
agentflow config --config server.toml --port 9000
""",
    add_options=add_config_flags,
    run=_run,
)
