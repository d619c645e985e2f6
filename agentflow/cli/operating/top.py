"""``agentflow top``: a live view of a server.

``figures`` computes rates and quantiles from two scrapes of the server's metrics, ``render_figures`` draws
them, and ``run_top`` repeats both.
"""

from __future__ import annotations

import argparse
import math
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentflow.cli.command import Command, printable
from agentflow.cli.server_query import add_live_options, http_url, query_server
from agentflow.errors import ProtocolError

INTERVALS_S = (0.1, 3_600.0)
NO_NAME = "-"
"""The name of the model in metrics without the label ``model``."""

Buckets = Sequence[tuple[float, float]]
"""The upper bound and the number of values of each bucket. The last bound is infinite."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of metrics."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one scrape. ``at_s``: its time on any clock."""

    at_s: float
    samples: Sequence[Sample]

    def values(self, label: str) -> list[str]:
        """All values of a label, in order."""
        return list(dict.fromkeys(one.labels[label] for one in self.samples if label in one.labels))

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels. A label that a sample lacks is ignored."""
        return sum(one.value for one in self._found(name, labels))

    def has(self, name: str, **labels: str) -> bool:
        """Whether there is a sample with this name and these labels."""
        return any(True for _ in self._found(name, labels))

    def number(self, name: str, **labels: str) -> int:
        """The number of samples with this name and these labels."""
        return sum(1 for _ in self._found(name, labels))

    def cumulative(self, name: str, **labels: str) -> dict[float, float]:
        """A histogram: the number of values up to each bound."""
        found: dict[float, float] = {}
        for one in self._found(f"{name}_bucket", labels):
            bound = float(one.labels["le"])
            found[bound] = found.get(bound, 0.0) + one.value
        return found

    def _found(self, name: str, labels: dict[str, str]) -> Iterable[Sample]:
        for one in self.samples:
            if one.name == name and all(
                one.labels.get(label, value) == value for label, value in labels.items()
            ):
                yield one


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles in seconds; None if there were no values."""

    p50_s: float | None
    p95_s: float | None


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """One model. Rates, quantiles and ``hit_rate`` are for the time between the scrapes, ``total_hit_rate``
    for the time since the server started. Hit rates are None if there were no prompts, and an engine's
    figures are None for a model behind an API. ``replicas_up``: the number of serving replicas."""

    name: str
    is_up: bool | None
    running: int
    waiting: int | None
    input_per_s: float
    output_per_s: float
    hit_rate: float | None
    total_hit_rate: float | None
    kv_in_use: int | None
    kv_cached: int | None
    kv_free: int | None
    ttft: Quantiles
    tpot: Quantiles
    restarts: int | None
    replicas: int = 1
    replicas_up: int = 1


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """One tenant. ``requests``: started between the scrapes; ``total_requests``: since the server started."""

    name: str
    requests: int
    total_requests: int
    queue_wait: Quantiles


@dataclass(frozen=True, slots=True)
class Figures:
    """``over_s``: the time between the scrapes."""

    over_s: float
    sessions: int
    models: list[ModelFigures]
    tenants: list[TenantFigures]


def figures(before: Scrape, now: Scrape) -> Figures:
    """The figures for the time between two scrapes of a server.

    >>> figures(before, now).models[0].output_per_s
    37.5
    """
    over_s = max(now.at_s - before.at_s, 1e-9)
    models = now.values("model") or [NO_NAME]
    # Calls to an API do not wait.
    tenants = [
        name for name in now.values("tenant") if now.has("agentflow_queue_wait_seconds_count", tenant=name)
    ]
    return Figures(
        over_s=over_s,
        sessions=int(now.total("agentflow_sessions")),
        models=[_model(name, before, now, over_s) for name in models],
        tenants=[_tenant(name, before, now) for name in tenants],
    )


def _model(name: str, before: Scrape, now: Scrape, over_s: float) -> ModelFigures:
    def grown(counter: str, **labels: str) -> float:
        return growth(before.total(counter, model=name, **labels), now.total(counter, model=name, **labels))

    has_engine = now.has("agentflow_engine_up", model=name)

    def of_engine(metric: str, **labels: str) -> int | None:
        return int(now.total(metric, model=name, **labels)) if has_engine else None

    prompts, computed = "agentflow_prompt_tokens_total", {"source": "computed"}
    return ModelFigures(
        name=name,
        is_up=now.total("agentflow_engine_up", model=name) > 0 if has_engine else None,
        running=int(now.total("agentflow_running_requests", model=name)),
        waiting=of_engine("agentflow_waiting_requests"),
        input_per_s=grown(prompts) / over_s,
        output_per_s=grown("agentflow_generated_tokens_total") / over_s,
        hit_rate=_hit_rate(grown(prompts), grown(prompts, **computed)),
        total_hit_rate=_hit_rate(now.total(prompts, model=name), now.total(prompts, model=name, **computed)),
        kv_in_use=of_engine("agentflow_kv_tokens", state="in_use"),
        kv_cached=of_engine("agentflow_kv_tokens", state="cached"),
        kv_free=of_engine("agentflow_kv_tokens", state="free"),
        ttft=_quantiles("agentflow_ttft_seconds", before, now, model=name),
        tpot=_quantiles("agentflow_tpot_seconds", before, now, model=name),
        restarts=of_engine("agentflow_engine_restarts_total"),
        replicas=now.number("agentflow_replica_up", model=name) or 1,
        replicas_up=int(now.total("agentflow_replica_up", model=name)),
    )


def _tenant(name: str, before: Scrape, now: Scrape) -> TenantFigures:
    began = "agentflow_queue_wait_seconds_count"
    total = now.total(began, tenant=name)
    return TenantFigures(
        name=name,
        requests=int(growth(before.total(began, tenant=name), total)),
        total_requests=int(total),
        queue_wait=_quantiles("agentflow_queue_wait_seconds", before, now, tenant=name),
    )


def growth(before: float, now: float) -> float:
    """The increase of a counter. If it decreased, it was reset to 0 in between."""
    return now - before if now >= before else now


def _hit_rate(prompts: float, computed: float) -> float | None:
    """The fraction of the prompt tokens that were in the cache."""
    return 1 - computed / prompts if prompts > 0 else None


def _quantiles(name: str, before: Scrape, now: Scrape, **labels: str) -> Quantiles:
    old, new = before.cumulative(name, **labels), now.cumulative(name, **labels)
    buckets = buckets_between(old, new)
    return Quantiles(quantile(buckets, 0.5), quantile(buckets, 0.95))


def buckets_between(old: dict[float, float], new: dict[float, float]) -> Buckets:
    """The values that a histogram received between two scrapes. If it has fewer values than before, it was
    reset in between."""
    was_reset = any(new[bound] < old.get(bound, 0.0) for bound in new)
    so_far = 0.0
    buckets: list[tuple[float, float]] = []
    for bound in sorted(new):
        cumulative = new[bound] - (0.0 if was_reset else old.get(bound, 0.0))
        buckets.append((bound, cumulative - so_far))
        so_far = cumulative
    return buckets


def quantile(buckets: Buckets, fraction: float) -> float | None:
    """The value that this fraction of all values does not exceed, by linear interpolation within a bucket.
    Values above the last finite bound count as that bound. None if there are no values.

    >>> quantile([(1.0, 0), (2.0, 10), (math.inf, 0)], 0.5)
    1.5
    """
    total = sum(count for _, count in buckets)
    if total <= 0:
        return None
    wanted, so_far, lower = fraction * total, 0.0, 0.0
    for bound, count in buckets:
        if count > 0 and so_far + count >= wanted:
            return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - so_far) / count
        so_far += count
        lower = lower if math.isinf(bound) else bound
    return lower


METRICS_PATH = "/metrics"
# Figures are means over this time. Over a single second they would change too fast to be read.
WINDOW_S = 5.0
BAR_CELLS = 14
MAX_TENANTS = 20


def run_top(
    scrape: Callable[[], Scrape],
    wait: Callable[[float], bool | None],
    console: Console,
    *,
    url: str,
    interval_s: float,
    once: bool,
) -> None:
    """Shows frames until the view ends.

    Args:
        scrape: Reads the server's metrics.
        wait: Waits for some seconds; returns True to end the view.
        console: Shows the frames.
        url: The server's address, for the heading.
        interval_s: The seconds between two scrapes.
        once: Ends after one frame.
    """
    first = scrape()
    if wait(interval_s):
        return
    scrapes = deque([first, scrape()])
    if once:
        console.print(render_figures(figures(first, scrapes[-1]), url))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render_figures(figures(scrapes[0], scrapes[-1]), url), refresh=True)
            if wait(interval_s):
                return
            scrapes.append(scrape())
            while scrapes[-1].at_s - scrapes[1].at_s >= WINDOW_S:
                scrapes.popleft()


@contextmanager
def waiting_for_q() -> Iterator[Callable[[float], bool]]:
    """Gives a function that waits for some seconds, and returns True as soon as ``q`` is pressed. Keys are
    read without Enter and are not shown. Without a terminal to read from, the function only waits."""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield _sleep
        return
    if sys.stdin is None or not sys.stdin.isatty():
        yield _sleep
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)  # Ctrl-C still interrupts
    try:
        yield lambda seconds: _pressed_q(keyboard, seconds)
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)  # noqa: TID251  (the interval between updates)
    return False


def _pressed_q(keyboard: int, seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([keyboard], [], [], left_s)[0]:
            keys = os.read(keyboard, 1024)
            if not keys or b"q" in keys.lower():  # no keys: the terminal is gone
                return True
    return False


def scrape_server(url: str, api_key: str | None) -> Scrape:
    """Reads the server's metrics. ``ServerError`` if that fails."""
    return parse_metrics(query_server(url, METRICS_PATH, api_key), url, time.monotonic())


def parse_metrics(content: bytes, url: str, at_s: float) -> Scrape:
    """Parses metrics. ``ProtocolError`` if they do not come from an agentflow server."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        samples = [
            _checked(Sample(sample.name, dict(sample.labels), float(sample.value)))
            for family in text_string_to_metric_families(content.decode())
            for sample in family.samples
            if sample.name.startswith("agentflow_")
        ]
    except (ValueError, KeyError, IndexError):  # the parser's errors for other content
        samples = []
    if any(sample.name.startswith("agentflow_gateway_") for sample in samples):
        raise ProtocolError(f"{url} is a gateway: give the URL of one of its servers")
    if not samples:
        raise ProtocolError(f"{url} has no metrics of an agentflow server")
    return Scrape(at_s, samples)


def _checked(sample: Sample) -> Sample:
    """The sample. ``ValueError`` or ``KeyError`` for numbers that no server of agentflow writes."""
    if not math.isfinite(sample.value):
        raise ValueError(sample.value)
    if sample.name.endswith("_bucket"):
        float(sample.labels["le"])
    return sample


def render_figures(now: Figures, url: str) -> RenderableType:
    """One frame, for a width of at least 80 columns."""
    sessions = f"{now.sessions:,} session{'s' * (now.sessions != 1)}"
    title = Text.assemble((f"agentflow {url}", "bold"), f"   {sessions}")
    title.append(f"   means over {now.over_s:.1f} s", "dim")
    parts: list[RenderableType] = [title, "", _load(now), "", _times(now)]
    if now.tenants:
        parts += ["", _tenants(now)]
    return Group(*parts)


def _load(now: Figures) -> Table:
    table = _table("model")
    for header in ("run", "wait", "in/s", "out/s", "hits", "total"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("KV: # used, = cached", no_wrap=True)
    for model in now.models:
        table.add_row(
            _name(model),
            f"{model.running:,}",
            Text(_count(model.waiting), style="yellow" if model.waiting else ""),
            _rate(model.input_per_s),
            _rate(model.output_per_s),
            _percent(model.hit_rate),
            _percent(model.total_hit_rate),
            kv_bar(model),
        )
    return table


def _name(model: ModelFigures) -> Text:
    if model.is_up is False:
        return Text(f"{model.name} (down)", style="red")
    if model.replicas_up < model.replicas and model.replicas > 1:
        return Text(f"{model.name} ({model.replicas_up} of {model.replicas} up)", style="yellow")
    return Text(model.name)


def _times(now: Figures) -> Table:
    table = _table("model")
    for header in ("TTFT p50", "p95", "TPOT p50", "p95", "restarts"):
        table.add_column(header, justify="right", no_wrap=True)
    for model in now.models:
        restarts = Text(_count(model.restarts), style="red" if model.restarts else "")
        table.add_row(Text(model.name), *_seconds(model.ttft), *_seconds(model.tpot), restarts)
    return table


def _tenants(now: Figures) -> Table:
    table = _table("tenant")
    for header in ("requests", "total", "wait p50", "p95"):
        table.add_column(header, justify="right", no_wrap=True)
    busiest = sorted(now.tenants, key=lambda tenant: (-tenant.requests, -tenant.total_requests, tenant.name))
    for tenant in busiest[:MAX_TENANTS]:
        counts = (f"{tenant.requests:,}", f"{tenant.total_requests:,}")
        table.add_row(Text(printable(tenant.name)), *counts, *_seconds(tenant.queue_wait))
    if len(busiest) > MAX_TENANTS:
        table.add_row(Text(f"and {len(busiest) - MAX_TENANTS} more", style="dim"))
    return table


def _table(first: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    # On a narrow terminal, only names are wrapped: every number is shown.
    table.add_column(first, overflow="fold", min_width=12, max_width=28)
    return table


def kv_bar(model: ModelFigures) -> str:
    """The use of the pool: by running requests, by the cache, and the percentage of both."""
    in_use_tokens, cached_tokens = model.kv_in_use or 0, model.kv_cached or 0
    total = in_use_tokens + cached_tokens + (model.kv_free or 0)
    if not total:
        return "-"
    # At least one cell for each part that is not empty.
    in_use = math.ceil(BAR_CELLS * in_use_tokens / total)
    used = max(in_use, math.ceil(BAR_CELLS * (in_use_tokens + cached_tokens) / total))
    bar = f"{'#' * in_use}{'=' * (used - in_use)}{'·' * (BAR_CELLS - used)}"
    return f"{bar} {(in_use_tokens + cached_tokens) / total:.0%}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _seconds(quantiles: Quantiles) -> tuple[str, str]:
    return _duration(quantiles.p50_s), _duration(quantiles.p95_s)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_live_options(
        parser,
        api_key="a key that may read metrics",
        interval="time between updates",
        default_s=1.0,
        interval_s=INTERVALS_S,
    )


def _run(options: argparse.Namespace) -> int:
    console = Console()
    url = http_url(options.url)
    once = options.once or not console.is_terminal
    try:
        with nullcontext(_sleep) if once else waiting_for_q() as wait:
            run_top(
                lambda: scrape_server(url, options.api_key),
                wait,
                console,
                url=url,
                interval_s=options.interval,
                once=once,
            )
    except KeyboardInterrupt:  # ends the view
        if options.once:
            raise
    return 0


COMMAND = Command(
    name="top",
    summary="show a server's load, live",
    description="""\
Shows the load of a server: running and waiting requests, input and output
tokens per second, the cache's hit rate (current and total), the use of the KV
pool, the time to the first token (TTFT) and per token after it (TPOT), and the
waiting times of each tenant. Press q or Ctrl-C to exit.""",
    examples="""\
agentflow top                                  the server on this machine
agentflow top --url https://llm.example --interval 5
agentflow top --once                           one frame, for scripts
""",
    add_options=_add_options,
    run=_run,
)
