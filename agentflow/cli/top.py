"""``agentflow top``: a live view of a server, made of what ``/metrics`` tells."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from math import ceil

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentflow.cli.command import Command
from agentflow.cli.server_question import API_KEY_VARIABLE, DEFAULT_URL, ask_server, http_url
from agentflow.cli.top_figures import Figures, ModelFigures, Quantiles, Sample, Scrape, figures
from agentflow.errors import ProtocolError

METRICS_PATH = "/metrics"
# Figures are means over so long: a second alone jumps too much to be read.
WINDOW_S = 5.0
BAR_CELLS = 14
MAX_TENANTS = 20


def run_top(
    scrape: Callable[[], Scrape],
    wait: Callable[[float], None],
    console: Console,
    *,
    url: str,
    interval_s: float,
    once: bool,
) -> None:
    """Shows frames until it is interrupted, or one. ``wait(seconds)`` passes the time between two scrapes."""
    first = scrape()
    wait(interval_s)
    scrapes = deque([first, scrape()])
    if once:
        console.print(frame(figures(first, scrapes[-1]), url))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(frame(figures(scrapes[0], scrapes[-1]), url), refresh=True)
            wait(interval_s)
            scrapes.append(scrape())
            while scrapes[-1].at_s - scrapes[1].at_s >= WINDOW_S:
                scrapes.popleft()


def scrape_server(url: str, api_key: str | None) -> Scrape:
    """What the server tells now. ``ServerError`` where it does not."""
    return parse_metrics(ask_server(url, METRICS_PATH, api_key), url, time.monotonic())


def parse_metrics(content: bytes, url: str, at_s: float) -> Scrape:
    """``ProtocolError`` for what is no metrics, or not those of an agentflow server."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        samples = [
            Sample(sample.name, dict(sample.labels), float(sample.value))
            for family in text_string_to_metric_families(content.decode())
            for sample in family.samples
            if sample.name.startswith("agentflow_")
        ]
    except (ValueError, KeyError, IndexError):  # whatever the parser stumbles over
        samples = []
    if not samples:
        raise ProtocolError(f"{url} answers, but not as an agentflow server does")
    return Scrape(at_s, samples)


def frame(now: Figures, url: str) -> RenderableType:
    """One picture, for any width from 80 columns."""
    sessions = f"{now.sessions:,} session{'s' * (now.sessions != 1)}"
    title = Text.assemble((f"agentflow {url}", "bold"), f"   {sessions}")
    title.append(f"   means over {now.over_s:.1f} s", "dim")
    parts: list[RenderableType] = [title, "", _load(now), "", _times(now)]
    if now.tenants:
        parts += ["", _tenants(now)]
    return Group(*parts)


def _load(now: Figures) -> Table:
    table = _table("model")
    for header in ("run", "wait", "in/s", "out/s", "hits", "hits ever"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("KV: # held, = cached", no_wrap=True)
    for model in now.models:
        table.add_row(
            Text(model.name) if model.is_up else Text(f"{model.name} (down)", style="red"),
            f"{model.running:,}",
            Text(f"{model.waiting:,}", style="yellow" if model.waiting else ""),
            _rate(model.input_per_s),
            _rate(model.output_per_s),
            _percent(model.hit_rate),
            _percent(model.hit_rate_ever),
            kv_bar(model),
        )
    return table


def _times(now: Figures) -> Table:
    table = _table("model")
    for header in ("TTFT p50", "p95", "TPOT p50", "p95", "restarts"):
        table.add_column(header, justify="right", no_wrap=True)
    for model in now.models:
        restarts = Text(f"{model.restarts:,}", style="red" if model.restarts else "")
        table.add_row(Text(model.name), *_seconds(model.ttft), *_seconds(model.tpot), restarts)
    return table


def _tenants(now: Figures) -> Table:
    table = _table("tenant")
    for header in ("requests", "ever", "waited p50", "p95"):
        table.add_column(header, justify="right", no_wrap=True)
    busiest = sorted(now.tenants, key=lambda tenant: (-tenant.requests, -tenant.requests_ever, tenant.name))
    for tenant in busiest[:MAX_TENANTS]:
        counts = (f"{tenant.requests:,}", f"{tenant.requests_ever:,}")
        table.add_row(Text(_harmless(tenant.name)), *counts, *_seconds(tenant.queue_wait))
    if len(busiest) > MAX_TENANTS:
        table.add_row(Text(f"and {len(busiest) - MAX_TENANTS} more", style="dim"))
    return table


def _table(first: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column(first, no_wrap=True, overflow="ellipsis", min_width=12, max_width=28)
    return table


def kv_bar(model: ModelFigures) -> str:
    """How full the pool is: what running requests hold, what is cached, and both in per cent."""
    total = model.kv_held + model.kv_cached + model.kv_free
    if not total:
        return "-"
    # A cell for whatever is there at all.
    held = ceil(BAR_CELLS * model.kv_held / total)
    used = max(held, ceil(BAR_CELLS * (model.kv_held + model.kv_cached) / total))
    bar = f"{'#' * held}{'=' * (used - held)}{'·' * (BAR_CELLS - used)}"
    return f"{bar} {(model.kv_held + model.kv_cached) / total:.0%}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _seconds(quantiles: Quantiles) -> tuple[str, str]:
    return _duration(quantiles.p50_s), _duration(quantiles.p95_s)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _harmless(name: str) -> str:
    """A tenant's name is what a client says: it must not steer the terminal."""
    return "".join(char if char.isprintable() else "·" for char in name)


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0.1 to 3600, not {text!r}")
    return value


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", help=f"the server (default: AGENTFLOW_URL, or {DEFAULT_URL})")
    add("--api-key", metavar="KEY", help=f"a key that may see metrics (default: {API_KEY_VARIABLE})")
    add("--interval", type=_interval, default=1.0, metavar="SECONDS", help="between two looks (%(default)s)")
    add("--once", action="store_true", help="show one picture and end; so it is where there is no terminal")


def _run(options: argparse.Namespace) -> int:
    console = Console()
    url = http_url(options.url)
    try:
        run_top(
            lambda: scrape_server(url, options.api_key),
            time.sleep,  # noqa: TID251  (the time between two looks is what was asked for)
            console,
            url=url,
            interval_s=options.interval,
            once=options.once or not console.is_terminal,
        )
    except KeyboardInterrupt:  # how one leaves it
        if options.once:
            raise
    return 0


COMMAND = Command(
    name="top",
    summary="watch a server at work",
    description="""\
Shows what a server does: requests running and waiting, tokens a second in and
out, the cache's hit rate (now and ever), how full the KV pool is, times to the
first token (TTFT) and per token after it (TPOT), and each tenant's waiting.
Ctrl-C leaves.""",
    examples="""\
agentflow top                                  the server on this machine
agentflow top --url https://llm.example --interval 5
agentflow top --once                           one picture, for scripts
""",
    add_options=_add_options,
    run=_run,
)
