"""The figures of ``agentflow top`` from two scrapes, to the last digit, and its screen."""

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agentflow.cli.operating.top import (
    ModelFigures,
    Quantiles,
    Scrape,
    buckets_between,
    figures,
    growth,
    kv_bar,
    parse_metrics,
    quantile,
    render_figures,
    run_top,
)
from agentflow.cli.operating.watch import render_graphs
from agentflow.engine.messages import BucketCounts
from agentflow.errors import ProtocolError
from agentflow.server.metrics.metrics import ServerMetrics
from agentflow.server.metrics.request_times import WAIT_BOUNDS_S

URL = "http://127.0.0.1:8410"

BEFORE = """
agentflow_engine_up{model="a"} 1
agentflow_engine_up{model="b"} 1
agentflow_sessions 4
agentflow_running_requests{model="a"} 9
agentflow_prompt_tokens_total{model="a",source="prompt_cache"} 100
agentflow_prompt_tokens_total{model="a",source="output_cache"} 0
agentflow_prompt_tokens_total{model="a",source="computed"} 300
agentflow_prompt_tokens_total{model="b",source="computed"} 70
agentflow_generated_tokens_total{model="a"} 1000
agentflow_generated_tokens_total{model="b"} 900
agentflow_ttft_seconds_bucket{model="a",le="0.1"} 5
agentflow_ttft_seconds_bucket{model="a",le="0.2"} 5
agentflow_ttft_seconds_bucket{model="a",le="+Inf"} 6
agentflow_queue_wait_seconds_bucket{model="a",tenant="ann",le="1.0"} 1
agentflow_queue_wait_seconds_bucket{model="a",tenant="ann",le="+Inf"} 1
agentflow_queue_wait_seconds_count{model="a",tenant="ann"} 1
"""
NOW = """
agentflow_engine_up{model="a"} 1
agentflow_engine_up{model="b"} 0
agentflow_sessions 5
agentflow_running_requests{model="a"} 2
agentflow_running_requests{model="b"} 1
agentflow_waiting_requests{model="a"} 3
agentflow_kv_tokens{model="a",state="in_use"} 10
agentflow_kv_tokens{model="a",state="cached"} 30
agentflow_kv_tokens{model="a",state="free"} 60
agentflow_prompt_tokens_total{model="a",source="prompt_cache"} 130
agentflow_prompt_tokens_total{model="a",source="output_cache"} 20
agentflow_prompt_tokens_total{model="a",source="computed"} 350
agentflow_prompt_tokens_total{model="b",source="computed"} 70
agentflow_generated_tokens_total{model="a"} 1150
agentflow_generated_tokens_total{model="b"} 30
agentflow_ttft_seconds_bucket{model="a",le="0.1"} 5
agentflow_ttft_seconds_bucket{model="a",le="0.2"} 15
agentflow_ttft_seconds_bucket{model="a",le="+Inf"} 16
agentflow_queue_wait_seconds_bucket{model="a",tenant="ann",le="1.0"} 3
agentflow_queue_wait_seconds_bucket{model="a",tenant="ann",le="+Inf"} 3
agentflow_queue_wait_seconds_count{model="a",tenant="ann"} 3
agentflow_queue_wait_seconds_bucket{model="b",tenant="ann",le="1.0"} 2
agentflow_queue_wait_seconds_bucket{model="b",tenant="ann",le="+Inf"} 2
agentflow_queue_wait_seconds_count{model="b",tenant="ann"} 2
agentflow_queue_wait_seconds_bucket{model="b",tenant="bob",le="1.0"} 0
agentflow_queue_wait_seconds_bucket{model="b",tenant="bob",le="+Inf"} 0
agentflow_queue_wait_seconds_count{model="b",tenant="bob"} 0
agentflow_engine_restarts_total{model="b"} 2
"""


def scraped(text: str, at_s: float) -> Scrape:
    return parse_metrics(text.encode(), URL, at_s)


def test_the_figures_of_two_scrapes():
    found = figures(scraped(BEFORE, 100.0), scraped(NOW, 102.0))
    assert (found.over_s, found.sessions) == (2.0, 5)
    a, b = found.models
    assert (a.name, a.is_up, a.running, a.waiting, a.restarts) == ("a", True, 2, 3, 0)
    assert (a.input_per_s, a.output_per_s) == (50.0, 75.0)
    assert (a.hit_rate, a.total_hit_rate) == (0.5, 1 - 350 / 500)
    assert (a.kv_in_use, a.kv_cached, a.kv_free) == (10, 30, 60)
    assert a.ttft.p50_s == pytest.approx(0.15)
    assert a.ttft.p95_s == pytest.approx(0.195)
    assert a.tpot == Quantiles(None, None)
    assert (b.name, b.is_up, b.running, b.restarts) == ("b", False, 1, 2)
    assert b.output_per_s == 15.0  # its counter began again
    assert (b.hit_rate, b.total_hit_rate) == (None, 0.0)
    ann, bob = found.tenants
    assert (ann.name, ann.requests, ann.total_requests) == ("ann", 4, 5)
    assert ann.queue_wait == Quantiles(0.5, 0.95)
    assert (bob.requests, bob.total_requests, bob.queue_wait) == (0, 0, Quantiles(None, None))


def test_metrics_without_the_name_of_a_model_are_of_one():
    before = "agentflow_engine_up 1\nagentflow_generated_tokens_total 100\n"
    now = "agentflow_engine_up 1\nagentflow_generated_tokens_total 190\n"
    (model,) = figures(scraped(before, 0.0), scraped(now, 2.0)).models
    assert (model.name, model.is_up, model.output_per_s) == ("-", True, 45.0)


def test_the_metrics_of_a_server_are_read():
    metrics = ServerMetrics()
    times = metrics.of("small").requests
    before = parse_metrics(metrics.text(), URL, 0.0)
    times.ttft.count(WAIT_BOUNDS_S, 0.5)
    times.queue_wait['a "b"\n\\'] = BucketCounts.empty(WAIT_BOUNDS_S)
    times.queue_wait['a "b"\n\\'].count(WAIT_BOUNDS_S, 0.001)
    found = figures(before, parse_metrics(metrics.text(), URL, 1.0))
    bound = next(bound for bound in WAIT_BOUNDS_S if bound >= 0.5)
    assert found.models[0].name == "small"
    assert found.models[0].ttft.p95_s is not None
    assert found.models[0].ttft.p95_s <= bound
    assert [(tenant.name, tenant.requests) for tenant in found.tenants] == [('a "b"\n\\', 1)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>hello</html>",
        b"up 1\n",
        b'a{b="c 1\n',
        b"\xff\xfe",
        b"agentflow_sessions NaN\n",
        b'agentflow_kv_tokens{model="a",state="free"} 1e400\n',
        b"agentflow_ttft_seconds_bucket 1\n",
        b'agentflow_ttft_seconds_bucket{le="x"} 1\n',
    ],
)
def test_f37_metrics_of_another_program_are_an_error(content):
    with pytest.raises(ProtocolError):
        parse_metrics(content, URL, 0.0)


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_a_counter_grows_or_begins_anew(before, now):
    assert growth(before, now) == (now - before if now >= before else now)


@given(
    st.lists(st.floats(0.0, 9.99), min_size=1, max_size=40),
    st.lists(st.floats(0.0, 9.99), max_size=40),
    st.floats(0.01, 1.0),
)
def test_a_quantile_is_within_the_bucket_of_the_true_one(fresh, earlier, share):
    bounds = [0.1, 0.5, 1.0, 2.0, 10.0, math.inf]

    def cumulated(values):
        return {bound: float(sum(value <= bound for value in values)) for bound in bounds}

    found = quantile(buckets_between(cumulated(earlier), cumulated(earlier + fresh)), share)
    true = sorted(fresh)[math.ceil(share * len(fresh) - 1e-9) - 1]
    index = next(index for index, bound in enumerate(bounds) if true <= bound)
    lower = bounds[index - 1] if index else 0.0
    assert found is not None
    assert lower - 1e-6 <= found <= bounds[index] + 1e-6


def test_quantiles_at_the_edges():
    assert quantile([], 0.5) is None
    assert quantile([(1.0, 0), (math.inf, 0)], 0.5) is None
    assert quantile([(1.0, 0), (2.0, 10), (math.inf, 0)], 0.5) == 1.5
    assert quantile([(1.0, 0), (2.0, 0), (math.inf, 3)], 0.5) == 2.0  # beyond all bounds


def test_a_histogram_that_began_anew_counts_all():
    old = {1.0: 5.0, math.inf: 9.0}
    assert buckets_between(old, {1.0: 2.0, math.inf: 3.0}) == [(1.0, 2.0), (math.inf, 1.0)]
    assert buckets_between({}, {1.0: 2.0, math.inf: 3.0}) == [(1.0, 2.0), (math.inf, 1.0)]


def model(**changes) -> ModelFigures:
    none = Quantiles(None, None)
    fields = {
        "name": "smollm2-135m", "is_up": True, "running": 64, "waiting": 1234, "input_per_s": 98_765.0,
        "output_per_s": 1234.0, "hit_rate": 1.0, "total_hit_rate": 0.5, "kv_in_use": 50, "kv_cached": 50,
        "kv_free": 0, "ttft": none, "tpot": none, "restarts": 0,
    }  # fmt: skip
    return ModelFigures(**{**fields, **changes})


def test_the_bar_shows_what_is_there():
    assert kv_bar(model()) == "#######======= 100%"
    assert kv_bar(model(kv_in_use=1, kv_cached=0, kv_free=9999)) == "#············· 0%"
    assert kv_bar(model(kv_in_use=0, kv_cached=50, kv_free=50)) == "=======······· 50%"
    assert kv_bar(model(kv_in_use=0, kv_cached=0, kv_free=0)) == "-"


@pytest.mark.parametrize("width", [80, 120])
def test_a_frame_fits_the_terminal_and_holds_the_figures(width):
    console = Console(file=io.StringIO(), width=width)
    console.print(render_figures(figures(scraped(BEFORE, 0.0), scraped(NOW, 2.0)), URL))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    cells = [line.split() for line in lines]
    assert ["a", "2", "3", "50", "75", "50%", "30%", "##====········", "40%"] in cells
    assert ["b", "(down)", "1", "0", "0", "15", "-", "0%", "-"] in cells
    assert ["a", "150", "ms", "195", "ms", "-", "-", "0"] in cells
    assert ["ann", "4", "5", "500", "ms", "950", "ms"] in cells
    assert "…" not in console.file.getvalue()


def test_f37_a_long_name_is_wrapped_and_the_numbers_stay_whole():
    text = NOW.replace('model="b"', 'model="smollm2-135m-instruct"')
    console = Console(file=io.StringIO(), width=80)
    console.print(render_figures(figures(scraped(text, 0.0), scraped(text, 2.0)), URL))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in console.file.getvalue()
    assert lines[2].split()[:7] == ["model", "run", "wait", "in/s", "out/s", "hits", "total"]
    assert any(line.split() == ["(down)"] for line in lines)


def test_f37_the_heading_of_programs_is_one_line():
    console = Console(file=io.StringIO(), width=80)
    console.print(render_graphs([], URL))
    assert console.file.getvalue().splitlines()[1] == ""


def test_a_tenants_name_does_not_steer_the_terminal():
    text = NOW.replace("bob", "\x1b[2J")
    console = Console(file=io.StringIO(), width=80)
    console.print(render_figures(figures(scraped(text, 0.0), scraped(text, 2.0)), URL))
    assert "\x1b" not in console.file.getvalue()


def test_the_live_view_goes_on_until_it_is_interrupted_and_looks_back_over_a_few_seconds():
    clock = [0.0]

    def scrape() -> Scrape:
        return scraped(f"agentflow_generated_tokens_total {clock[0] ** 2}\n", clock[0])

    def wait(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] > 20:
            raise KeyboardInterrupt

    console = Console(file=io.StringIO(), width=80, height=12, force_terminal=True)
    with pytest.raises(KeyboardInterrupt):
        run_top(scrape, wait, console, url=URL, interval_s=1.0, once=False)
    last = console.file.getvalue().rpartition("means over ")[2]
    assert last.startswith("5.0 s")
    assert " 35 " in last  # (20² - 15²) / 5


def test_a_model_whose_replicas_do_not_all_serve_is_marked():
    lines = ['agentflow_engine_up{model="a"} 1', 'agentflow_engine_up{model="b"} 1']
    lines += [f'agentflow_replica_up{{model="a",replica="{number}"}} {number % 2}' for number in range(3)]
    lines += ['agentflow_replica_up{model="b",replica="0"} 1']
    now = scraped("\n".join(lines) + "\n", 1.0)
    a, b = figures(now, now).models
    assert (a.replicas, a.replicas_up, b.replicas, b.replicas_up) == (3, 1, 1, 1)
    console = Console(file=io.StringIO(), width=80)
    console.print(render_figures(figures(now, now), URL))
    shown = console.file.getvalue()
    assert shown.count("(1 of 3 up)") == 1
    assert "down" not in shown


def test_f37_a_gateway_has_no_load_to_show():
    with pytest.raises(ProtocolError, match="is a gateway"):
        parse_metrics(b'agentflow_gateway_target_up{target="http://a:1"} 1\n', URL, 0.0)
