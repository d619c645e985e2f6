"""``agentflow up``: pulls the model if it is missing, runs the server, and opens its page in a browser."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread
from msgspec.structs import replace

from agentflow.cli.command import Command
from agentflow.cli.operating.serve import pull_missing, run_serve
from agentflow.engine.machine.child_process import lower_priority
from agentflow.server.config.config import Effective, add_config_flags, read_flags
from agentflow.server.config.schema import ServeConfig
from agentflow.version import __version__

if TYPE_CHECKING:
    from agentflow.server.serve import RunningServer

# Addresses of all interfaces: a browser on this machine uses loopback.
ALL_INTERFACES = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def quiet(effective: Effective) -> ServeConfig:
    """The configuration, with a log level of warnings unless one was set."""
    config = effective.config
    if effective.sources["log_level"] != "default":
        return config
    return replace(config, logs=replace(config.logs, log_level="warning"))


async def welcome(server: RunningServer, *, has_page: bool, opens_browser: bool) -> None:
    """Prints the addresses, and opens the page."""
    base, url = server.http_url, server.url
    for everywhere, loopback in ALL_INTERFACES.items():
        base, url = (text.replace(f"//{everywhere}:", f"//{loopback}:") for text in (base, url))
    addresses = [
        *([("page", f"{base}/ui/")] if has_page else []),
        ("sessions", f'af.session("{url}")'),
        ("OpenAI", f'OpenAI(base_url="{base}/v1")'),
        ("Anthropic", f'Anthropic(base_url="{base}")'),
        ("metrics", f"{base}/metrics"),
    ]
    lines = [f"  {name:<11}{address}" for name, address in addresses]
    title = f"agentflow {__version__} serves {', '.join(server.models)}"
    weights = [f"{name}: {weights}" for name, weights in server.weights.items()]
    print("\n".join(["", title, *weights, "", *lines, "", "Ctrl-C ends it."]), flush=True)
    if has_page and opens_browser:
        # In a thread, because some browsers block until they are closed.
        await anyio.to_thread.run_sync(webbrowser.open, f"{base}/ui/", abandon_on_cancel=True)


def has_screen() -> bool:
    """Whether a browser can open a window. Without a screen, ``webbrowser`` may start a text browser."""
    if sys.platform != "linux":
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-browser", action="store_true", help="do not open the page in a browser")
    add_config_flags(parser)


def _run(options: argparse.Namespace) -> int:
    effective = read_flags(options)
    config = quiet(effective)
    pull_missing(config)
    lower_priority()
    names = ", ".join(model.name for model in config.models)
    print(f"loading {names} …", file=sys.stderr, flush=True)
    on_ready = partial(
        welcome, has_page=config.network.ui, opens_browser=not options.no_browser and has_screen()
    )
    run_serve(config, on_ready)
    return 0


COMMAND = Command(
    name="up",
    usage="agentflow up [--no-browser] [the options of `agentflow serve`]",
    summary="run the server and open its page in the browser",
    description="""\
Pulls the model if it is missing, runs the server, prints its addresses and
opens its page in the browser. Ctrl-C stops it. It has the options of
`agentflow serve` and logs only warnings unless --log-level is given.""",
    examples="""\
agentflow up                         the default model, and its page
agentflow up --no-browser --port 9000
agentflow up --model ./my-llama
""",
    add_options=_add_options,
    run=_run,
)
