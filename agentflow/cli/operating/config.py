"""``agentflow config``: shows the configuration that ``agentflow serve`` would use."""

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
    summary="show the configuration that `serve` would use",
    description="""\
Shows every setting that `agentflow serve` would use, with its source: a flag,
the environment, the file, or the default. The output is a configuration file
without keys and passwords.""",
    examples="""\
agentflow config                     all settings and their defaults
agentflow config > server.toml       a file to start from
agentflow config --config server.toml --port 9000
""",
    add_options=add_config_flags,
    run=_run,
)
