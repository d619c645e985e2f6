"""The simulator: replays in the time of its cost model, and its results."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from support.examples import examples
from support.faults import has_param

from agentflow.cli import main as cli
from agentflow.engine.scheduling.defaults import SIMULATED_POLICY_NAMES
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel, fit_cost
from agentflow.engine.simulator.depth_first import SIMULATED_POLICIES
from agentflow.engine.simulator.generators import (
    GENERATORS,
    agent_sessions,
    chains,
    chat,
    make_arrivals,
    tree_of_thought,
    unshared,
)
from agentflow.engine.simulator.side_by_side import SimulateOptions, run_simulate
from agentflow.engine.simulator.simulation import simulate
from agentflow.engine.simulator.summary import program_times, summarise
from agentflow.engine.simulator.workload import Arrival, Workload
from agentflow.engine.simulator.workload_file import WorkloadWriter, open_sink, read_workload, workload_name
from agentflow.errors import BadArgument

ONE_SECOND = CostModel(base_s=1, row_s=0, logits_s=0, read_s=0, pair_s=0)
FCFS = SchedulerConfig(max_running=2, token_budget=16, policy="fcfs")


def writer_of(path: Path, *, kv_tokens: int) -> WorkloadWriter:
    return WorkloadWriter(open_sink(path), workload_name(path), kv_tokens)


def arrival(prompt: list[int], output: list[int], at_s: float = 0.0, **kwargs) -> Arrival:
    return Arrival(np.array(prompt, np.int32), np.array(output, np.int32), at_s, **kwargs)


def test_times_are_those_of_the_steps():
    first = arrival([1, 2, 3], [4, 5, 6])
    second = arrival([9, 8], [7], at_s=0.5)
    third = arrival([1, 2, 3, 4, 5], [0], at_s=10, after=0)
    result = simulate(Workload("w", [first, second, third]), FCFS, cost=ONE_SECOND)
    times = {id(s.arrival): (s.arrived_s, s.first_s, s.ended_s, s.num_cached) for s in result.served}
    assert times[id(first)] == (0, 1, 3, 0)
    assert times[id(second)] == (0.5, 2, 2, 0)
    assert times[id(third)] == (13, 14, 14, 4)  # ten seconds after the first's end, on top of its output
    assert result.counters.steps == 4
    assert result.elapsed_s == 14
    assert result.hit_rate == 4 / 10


def test_a_request_that_can_never_run_is_counted_and_delays_nothing():
    workload = Workload("w", [arrival([1] * 50, [1]), arrival([2], [2], after=0)], kv_tokens=32)
    summary = summarise(simulate(workload, FCFS, cost=ONE_SECOND))
    assert summary.refused == 1
    assert summary.all.num_requests == 1


@given(
    st.lists(
        st.builds(
            arrival,
            prompt=st.lists(st.integers(0, 2), min_size=1, max_size=40),
            output=st.lists(st.integers(0, 9), min_size=1, max_size=5),
            at_s=st.integers(0, 9).map(float),
            tenant=st.sampled_from(["", "t"]),
            salt=st.sampled_from(["", "s"]),
            objective=st.sampled_from(["latency", "throughput"]),
            task_group=st.sampled_from(["", "g"]),
            state=st.sampled_from(["", "s"]),
            label=st.sampled_from(["", "l"]),
            max_new_tokens=st.integers(0, 9),
            program=st.sampled_from(["", "p"]),
            joins=st.sampled_from([(), (0, 1)]),
            model=st.sampled_from(["", "small"]),
        ),
        max_size=12,
    ),
    st.sampled_from(["w.jsonl", "w.jsonl.gz"]),
)
def test_a_workload_is_read_as_it_was_written(tmp_path_factory, arrivals, name):
    path = tmp_path_factory.mktemp("workload") / name
    writer = writer_of(path, kv_tokens=77)
    for one in arrivals:
        writer.write(one)
    writer.sink.close()
    workload = read_workload(path)
    assert (workload.name, workload.kv_tokens) == ("w", 77)
    assert len(workload.arrivals) == len(arrivals)
    for got, wanted in zip(workload.arrivals, arrivals, strict=True):
        assert got.prompt.tolist() == wanted.prompt.tolist()
        assert got.output.tolist() == wanted.output.tolist()
        for field in ("at_s", "after", "max_new_tokens", "tenant", "salt", "objective", "state", "label"):
            assert getattr(got, field) == getattr(wanted, field)
        assert (got.program, got.joins, got.model) == (wanted.program, wanted.joins, wanted.model)


def test_a_shared_beginning_is_written_once(tmp_path):
    writer = writer_of(tmp_path / "w.jsonl", kv_tokens=1)
    for last in range(10):
        writer.write(arrival([*range(1000), 5000 + last], [last]))
    writer.sink.close()
    assert (tmp_path / "w.jsonl").stat().st_size < 8000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the workload"),
        ("{}", "is not a workload"),
        ('{"generator": "nobody"}', "known: hot-and-cold"),
        ('{"generator": "chat", "parameters": {"turn": 1}}', "no parameter 'turn'; it has: num_chats"),
        ('{"generator": "chat", "parameters": {"seed": -5}}', "unsuitable value"),
        ('{"generator": "chat", "kv_tokens": -5}', "kv_tokens"),
        ('{"generator": "\udcff"}', "is not a workload"),
    ],
)
def test_f37_an_invalid_workload_is_a_one_line_error(tmp_path, capsys, content, message):
    path = tmp_path / "w.json"
    if content is not None:
        path.write_text(content, errors="surrogateescape")
    assert cli.main(["simulate", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


NUMBERS = st.one_of(st.integers(-2, 3), st.sampled_from([-(2**31), 2**31 - 1, 2**40, 2**62, 2**63, 10**30]))
ABSURD_LINES = st.fixed_dictionaries(
    {},
    optional={
        "at": st.one_of(NUMBERS, st.sampled_from([-0.5, 1e300])),
        "prompt": st.lists(NUMBERS, max_size=2),
        "output": st.lists(NUMBERS, max_size=2),
        "like": st.tuples(NUMBERS, NUMBERS),
        "after": NUMBERS,
        "joins": st.lists(NUMBERS, max_size=2),
        "limit": NUMBERS,
        "program": st.sampled_from(["", "p"]),
        "state": st.sampled_from(["", "s"]),
        "group": st.sampled_from(["", "g"]),
    },
)


@examples(100)
@given(
    lines=st.lists(ABSURD_LINES, min_size=1, max_size=3), kv_tokens=st.sampled_from([1, 9, 100, 2**60, 2**63])
)
@example(lines=[{"limit": 10**15}], kv_tokens=100)
@example(lines=[{"output": [], "limit": 1}], kv_tokens=9)
def test_f37_a_recording_with_absurd_numbers_is_replayed_or_refused(tmp_path_factory, lines, kv_tokens):
    """Each request is served or refused, or the command ends with one error."""
    path = tmp_path_factory.mktemp("workload") / "w.jsonl"
    header = {"agentflow_workload": 1, "kv_tokens": kv_tokens}
    whole = [{"at": 0, "prompt": [1, 2], "output": [3]} | line for line in [{}, *lines]]
    path.write_text("".join(json.dumps(line) + "\n" for line in [header, *whole]))
    console = Console(file=io.StringIO())
    try:
        [summary] = run_simulate(SimulateOptions(path, ["fair-lpm"]), console)
    except BadArgument:
        return
    assert summary.all.num_requests + summary.refused == len(whole)


@pytest.mark.parametrize("name", ["w.jsonl", "w.jsonl.gz"])
def test_all_whole_lines_of_a_truncated_file_are_read(tmp_path, name):
    writer = writer_of(tmp_path / name, kv_tokens=100)
    for number in range(3):
        writer.write(arrival([number] * 2000, [number]))
        writer.flush()
        sizes = (tmp_path / name).stat().st_size
    writer.sink.close()
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: sizes - 20])
    workload = read_workload(tmp_path / name)
    assert workload.is_truncated
    assert [a.prompt[0] for a in workload.arrivals] == [0, 1]
    console = Console(file=io.StringIO(), width=200)
    run_simulate(SimulateOptions(tmp_path / name, ["fcfs"]), console)
    assert "ends in the middle of a line" in console.file.getvalue()


def test_a_workload_of_another_version_is_refused(tmp_path):
    (tmp_path / "w.jsonl").write_text('{"agentflow_workload": 9}\n')
    with pytest.raises(BadArgument, match=r"\b9\b.*\b1\b"):
        read_workload(tmp_path / "w.jsonl")


@pytest.mark.parametrize("name", GENERATORS)
def test_generated_workloads_are_the_same_each_time_and_run_to_their_end(name):
    small = {
        "tree-of-thought": {"num_programs": 2},
        "chat": {"num_chats": 3},
        "chains": {"num_chains": 2, "length": 4, "chunk": 100},
        "map-reduce": {"num_programs": 2, "width": 4, "chunk": 100},
        "two-models": {"num_programs": 2, "rounds": 2},
        "multi-agent": {"num_programs": 2, "num_files": 2, "rounds": 2},
        "agent-sessions": {"num_sessions": 2, "turns": 4, "first": 500, "last": 4000, "output": 20},
    }
    parameters = small.get(name, {"num_requests": 20})
    once, again = make_arrivals(name, parameters), make_arrivals(name, parameters)
    assert [a.tokens.tolist() for a in once] == [a.tokens.tolist() for a in again]
    result = simulate(Workload(name, once, 20_000), SchedulerConfig())
    assert len(result.served) == len(once)
    assert result.counters.generated_tokens == sum(len(a.output) for a in once)


def test_turns_and_reasoning_find_all_earlier_tokens():
    for arrivals in (chat(num_chats=2), tree_of_thought(num_programs=2)):
        result = simulate(Workload("w", arrivals, 60_000), SchedulerConfig())
        for served in result.served:
            if served.arrival.after is not None:
                before = arrivals[served.arrival.after].tokens
                assert served.num_cached >= len(before) - 1  # the last one was never computed


def test_a_request_that_joins_others_comes_after_the_last_of_them():
    first, second = arrival([1] * 9, [1]), arrival([2] * 9, [1] * 20)
    joining = arrival([3] * 9, [1], at_s=0.5, after=0, joins=(1,))
    result = simulate(Workload("w", [first, second, joining], 400), FCFS, cost=ONE_SECOND)
    ended = {served.arrival.prompt[0]: served for served in result.served}
    assert ended[3].arrived_s == ended[2].ended_s + 0.5 > ended[1].ended_s + 0.5


def test_programs_end_sooner_if_the_scheduler_knows_them():
    """Chains that arrive together: each keeps its place, so the first ends long before the last."""
    workload = Workload("w", chains(num_chains=8, length=6, chunk=100, summary=5), 4000)
    config = SchedulerConfig(max_running=2)
    times = [
        program_times(simulate(workload, config, knows_programs=knows)).values() for knows in (True, False)
    ]
    assert len(times[0]) == len(times[1]) == 8
    assert sum(times[0]) < 0.8 * sum(times[1])


def test_the_times_of_tools_save_tokens_that_would_be_computed_again():
    """With a pool for half of the sessions: known times, then learned ones, then none."""
    sessions = agent_sessions(num_sessions=6, per_s=1.0, turns=10, first=200, last=1500, output=60)
    stateless = [replace(one, state="") for one in sessions]
    config = SchedulerConfig(max_running=4, token_budget=512)
    cost = CostModel(base_s=5e-3, row_s=2e-5, logits_s=0, read_s=0, pair_s=0)
    known, learned, none = (
        simulate(
            Workload("w", arrivals, 4500), config, cost=cost, knows_returns=knows
        ).counters.computed_tokens
        for arrivals, knows in ((sessions, True), (sessions, False), (stateless, False))
    )
    assert known < learned < none


def test_a_tenant_that_floods_takes_nothing_from_another():
    flood = [arrival([1000 + i] * 100, [1], tenant="flood") for i in range(200)]
    victim = [arrival([5000 + i] * 100, [1], at_s=5.0 + i, tenant="victim", label="v") for i in range(5)]
    workload = Workload("flood", [*flood, *victim], kv_tokens=4000)
    cost = CostModel(base_s=0.01, row_s=0.01, logits_s=0, read_s=0, pair_s=0)  # a second for each request
    fair, unfair = (
        summarise(simulate(workload, SchedulerConfig(token_budget=100, policy=policy), cost=cost))
        for policy in ("fair-lpm", "fcfs")
    )
    # Its share is half: each of its requests, one a second, waits for a turn of the other's at most.
    assert fair.by_label["v"].ttft_p99_s < 16 * 1.5
    assert unfair.by_label["v"].ttft_p99_s > 150


def test_fitting_finds_the_cost_model_again():
    model = CostModel(base_s=0.02, row_s=0.0003, logits_s=0.0, read_s=2e-6, pair_s=3e-8)
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(50):
        x = (1.0, *(float(v) for v in rng.integers(1, [256, 64, 50_000, 500_000])))
        samples.append((x, float(np.dot([0.02, 0.0003, 0.0, 2e-6, 3e-8], x))))
    fitted = fit_cost(samples)
    for name in ("base_s", "row_s", "read_s", "pair_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(model, name), rel=1e-3)
    assert fitted.logits_s == pytest.approx(0, abs=1e-9)


def test_the_cost_model_is_read_as_it_was_written(tmp_path):
    model = CostModel(base_s=0.5, row_s=1, logits_s=2, read_s=3, pair_s=4)
    model.write(tmp_path / "cost.json")
    assert CostModel.read(tmp_path / "cost.json") == model
    (tmp_path / "cost.json").write_text("[]")
    with pytest.raises(BadArgument, check=has_param("cost")):
        CostModel.read(tmp_path / "cost.json")


def test_the_command_has_every_policy():
    assert tuple(SIMULATED_POLICIES) == SIMULATED_POLICY_NAMES


def test_the_command_shows_the_policies_side_by_side(tmp_path):
    (tmp_path / "w.json").write_text('{"generator": "hot-and-cold", "parameters": {"num_requests": 60}}')
    console = Console(file=io.StringIO(), width=120)
    options = SimulateOptions(tmp_path / "w.json", ["fair-lpm", "fcfs"], json=tmp_path / "out.json")
    summaries = run_simulate(options, console)
    shown = console.file.getvalue()
    for text in ("w: 60 requests, 65,536 KV tokens", "fair-lpm", "fcfs", "hit rate", "cold: TTFT p99"):
        assert text in shown
    written = json.loads((tmp_path / "out.json").read_text())
    assert [run["policy"] for run in written] == [summary.policy for summary in summaries]


def test_more_than_fits_is_preempted_and_nothing_is_lost():
    workload = Workload("w", unshared(num_requests=60, prompt=20, output=90), kv_tokens=1000)
    result = simulate(workload, SchedulerConfig(max_running=64))
    assert result.counters.preemptions > 0
    assert len(result.served) == 60
    assert result.counters.generated_tokens == sum(len(a.output) for a in workload.arrivals)
