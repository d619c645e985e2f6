"""``agentflow watch``: the live graphs of the programs on a server.

The server sends changes (``Session.watch``), and ``render_graphs`` draws the graphs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import anyio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentflow.backends.open_session import session as open_session
from agentflow.cli.command import Command, printable
from agentflow.cli.server_query import add_live_options, http_url
from agentflow.protocol.events import LiveGraph, LiveNode, LiveState
from agentflow.protocol.ops import WATCH_INTERVALS_S

MAX_ROWS = 2_000
"""The maximum number of rows of a frame without a terminal. In a terminal, it is the number that fits."""
_HEADING_ROWS = 5
_STYLES = {"running": "green", "failed": "red"}


def render_graphs(graphs: Sequence[LiveGraph], url: str, max_rows: int = MAX_ROWS) -> RenderableType:
    """One frame: a row for each unfinished request, other variable or fork, and for each idle state."""
    found = [row for number, graph in enumerate(graphs, 1) for row in _rows(number, graph)]
    nodes = [node for graph in graphs for node in graph.nodes]
    running, waiting = (sum(node.status == status for node in nodes) for status in ("running", "waiting"))
    sessions = "session" if len(graphs) == 1 else "sessions"
    title = Text.assemble((f"agentflow {url}", "bold"), f"   {len(graphs):,} {sessions}")
    title.append(f"   {running:,} running, {waiting:,} waiting", "dim")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for header in ("session", "program", "state", "request", "status", "objective", "group", "after"):
        table.add_column(header, no_wrap=True, overflow="ellipsis")
    for row in found[:max_rows]:
        table.add_row(*row)
    num_left_out = sum([graph.num_states_left_out + graph.num_nodes_left_out for graph in graphs])
    if left := len(found[max_rows:]) + num_left_out:
        table.add_row(Text(f"and {left:,} more", style="dim"))
    return Group(title, "", table if found else Text("nothing is unfinished", style="dim"))


def _rows(number: int, graph: LiveGraph) -> Iterator[tuple[Text, ...]]:
    names = {node.id: printable(node.name) or f"{node.kind} {node.id}" for node in graph.nodes}
    unfinished = [node for node in graph.nodes if node.status != "done"]
    open_ids = {node.id for node in unfinished}
    of_state: dict[int, list[LiveNode]] = {}
    for node in unfinished:
        of_state.setdefault(node.state, []).append(node)
    for state in graph.states:
        label = printable(state.label) or str(state.program)
        first = Text(str(number)), Text(label), Text(str(state.id))
        for node in of_state.get(state.id, []):
            after = ", ".join([names[one] for one in node.needs if one in open_ids])
            yield (
                *first,
                Text(names[node.id]),
                _status(node),
                Text(node.objective if node.status != "failed" else ""),
                Text(str(node.group or "")),
                Text(after),
            )
        if state.id not in of_state:
            yield *first, Text("-", style="dim"), Text(_idle(state), style="dim")


def _status(node: LiveNode) -> Text:
    where = "" if node.replica is None else f" on {node.replica}"
    return Text(f"{node.status}{where}", style=_STYLES.get(node.status, ""))


def _idle(state: LiveState) -> str:
    return "failed or cancelled" if state.has_ended else "waits for its client"


async def run_watch(
    url: str, console: Console, *, api_key: str | None, interval_s: float, once: bool
) -> None:
    """Shows frames until it is cancelled, or one frame.

    Args:
        url: The http(s) URL of the server.
        console: Shows the frames.
        api_key: A key of the tenant whose programs are shown.
        interval_s: The minimum number of seconds between two frames.
        once: Ends after one frame.
    """
    async with open_session(f"ws{url.removeprefix('http')}", api_key=api_key) as flow:
        if once:
            async for graphs in flow.watch(interval_s=interval_s):
                console.print(render_graphs(graphs[1:], url))  # without the graph of this session
                return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            async for graphs in flow.watch(interval_s=interval_s):
                max_rows = max(1, console.height - _HEADING_ROWS)
                live.update(render_graphs(graphs[1:], url, max_rows), refresh=True)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_live_options(
        parser,
        api_key="the key whose programs are shown",
        interval="least time between updates",
        default_s=0.5,
        interval_s=WATCH_INTERVALS_S,
    )


def _run(options: argparse.Namespace) -> int:
    console = Console()
    once = options.once or not console.is_terminal

    async def watch() -> None:
        await run_watch(
            http_url(options.url), console, api_key=options.api_key, interval_s=options.interval, once=once
        )

    try:
        anyio.run(watch)
    except KeyboardInterrupt:  # ends the view
        if options.once:
            raise
    return 0


COMMAND = Command(
    name="watch",
    summary="show the programs that run on a server, live",
    description="""\
Shows the live graphs of the programs on a server: the open states of all
sessions and of programs over HTTP, with the requests that run or wait, their
objectives, their task groups, and the requests that they wait for. A key
shows the programs of its tenant. Ctrl-C ends the command.""",
    examples="""\
agentflow watch                                the server on this machine
agentflow watch --url https://llm.example --interval 2
agentflow watch --once                         one frame, for scripts
""",
    add_options=_add_options,
    run=_run,
)
