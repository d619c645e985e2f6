"""The real engine on a small random model that launches ahead: on a GPU with ``AGENTFLOW_DEVICE=cuda``,
elsewhere on a queue that does its work as late as a GPU may. Every request has the results that it has alone
on the CPU.

On a machine with a GPU and without a network, in one process::

    make gpu-test PYTHON=python3 WHEELS=FOLDER GPU_TESTS=tests/engine/test_device_engine.py JOBS=0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.device import DEVICE, QueuedStream
from support.engine.random_model import VOCAB, write_random_model
from support.engine.scheduler_harness import reads_of

from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.constrained.grammar_builder import BuiltGrammar
from agentflow.engine.engine import Engine
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.dfa import build_dfa
from agentflow.engine.grammar.grammar import Grammar
from agentflow.engine.grammar.regex import parse_regex
from agentflow.engine.messages import Abort, Failed, Finished, FromEngine, Progress, Stop
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.request import Submit
from agentflow.engine.runner import OutOfMemory
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import Cancelled, EngineFailed
from agentflow.protocol.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
NUM_SLOTS = 1200
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
PATTERNS = [
    r'\{"name": "[a-z]{1,6}", "quick": (true|false), "n": \[[0-9](, [0-9]){0,3}\]\}',
    r"(The quick brown (fox|dog) jumps over (the lazy dog|a question)\. ){1,3}",
    r"[a-f ]+",
    r"(yes|no|I do not know)",
]


class AheadRunner(TorchRunner):
    """Launches ahead. Where a queue stands in for a GPU, the arrays of a batch are overwritten after its
    launch, and slots that are free then, behind the batches in flight. ``engine`` uses it. ``fails_at``: the
    calls of ``launch`` and ``collect``, from 0, that run out of memory."""

    engine: Engine | None = None
    num_calls = 0
    fails_at: frozenset[int] = frozenset()

    def __init__(self, folder: Path, stream: QueuedStream | None) -> None:
        super().__init__(folder, num_slots=NUM_SLOTS, device=DEVICE, dtype="float32", stream=stream)
        self.all_info = self.info
        self.num_ahead = 0  # launches with a batch in flight
        self._num_in_flight = 0
        self._stand_in = stream

    def _call(self) -> None:
        self.num_calls += 1
        if self.num_calls - 1 in self.fails_at:
            raise OutOfMemory

    def launch(self, batch: Batch) -> Any:
        self._call()
        self.num_ahead += self._num_in_flight > 0
        self._num_in_flight += 1
        if self._stand_in is None:
            return super().launch(batch)
        assert self.engine is not None
        free = torch.from_numpy(np.flatnonzero(self.engine.scheduler.memory.slots._is_free))
        for layer in self.kv_layers:
            self._stand_in.run(lambda layer=layer: layer.index_fill_(0, free, torch.nan))  # type: ignore[misc]
        names = ("token_ids", "positions", "write_slots", "req_to_token", "req_rows", "query_lens", "kv_lens")
        copies = {name: getattr(batch, name).copy() for name in names}
        handle = super().launch(replace(batch, **copies))
        self._check_table(batch)
        for array in copies.values():
            array.fill(2**30)
        return handle

    def _check_table(self, batch: Batch) -> None:
        """When the batch runs, the table on the device is the scheduled one, wherever the batch reads it."""
        assert self._stand_in is not None
        assert self._ahead is not None
        table = self._ahead.table.slots
        for row, length in reads_of(batch):
            slots = torch.from_numpy(batch.req_to_token[row, :length].copy())
            self._stand_in.run(partial(_assert_equal, table[row, :length], slots))

    def collect(self, handle: Any) -> BatchOutput:
        self._num_in_flight -= 1
        output = super().collect(handle)
        self._call()
        return output

    def close(self) -> None:
        """Keeps the model for the next engine."""


def _assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found, expected)


class AloneRunner(TorchRunner):
    """The reference: one request at a time."""

    def close(self) -> None:
        """Keeps the model for the next engine."""


class PromptBuilder:
    """Builds each grammar when it is asked for: when a thread has built it depends on the machine's load."""

    def __init__(
        self, make: Callable[[CompiledConstraint], Grammar], deliver: Callable[[BuiltGrammar], None]
    ) -> None:
        self._make = make
        self._deliver = deliver

    def build(self, constraint: CompiledConstraint, tenant: str) -> None:
        self._deliver(BuiltGrammar(constraint.key, self._make(constraint)))

    def cancel(self, key: str) -> None:
        """It is built."""

    def close(self) -> None:
        """It has no thread."""


@dataclass(frozen=True)
class Model:
    """One model, on both devices. ``ends``: the results of the jobs that have run alone."""

    ahead: AheadRunner
    alone: AloneRunner
    tokenizer: Tokenizer
    ends: dict[str, Finished] = field(default_factory=dict)

    def end_alone(self, job: Job) -> Finished:
        key = repr(replace(job, aborts_after=None))
        if key not in self.ends:
            uncached = SchedulerConfig(use_cache=False)
            [end], _ = run_engine(self.alone, self.tokenizer, uncached, [replace(job, aborts_after=None)])
            assert isinstance(end, Finished)
            self.ends[key] = end
        return self.ends[key]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = write_random_model(tmp_path_factory.mktemp("model"), num_hidden_layers=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentflow.engine.engine.GrammarBuilder", PromptBuilder)
        patch.setenv("AGENTFLOW_KERNELS", "torch")
        alone = AloneRunner(folder, num_slots=NUM_SLOTS, device="cpu", dtype="float32")
        if DEVICE != "cpu":
            patch.delenv("AGENTFLOW_KERNELS")
        ahead = AheadRunner(folder, QueuedStream() if DEVICE == "cpu" else None)
        yield Model(ahead, alone, Tokenizer.from_folder(folder))
    TorchRunner.close(ahead)
    TorchRunner.close(alone)


@dataclass(frozen=True)
class Job:
    """A request. ``aborts_after``: the deltas of text that its caller reads."""

    prompt: tuple[int, ...]
    params: SamplingParams = GREEDY
    pattern: str | None = None
    choices: tuple[tuple[int, ...], ...] = ()
    aborts_after: int | None = None

    def submit(self, request_id: int) -> Submit:
        if self.choices:
            return Submit(request_id, [*self.prompt], None, choices=self.choices)
        constraint = None
        if self.pattern is not None:
            constraint = CompiledConstraint(self.pattern, "dfa", _DFAS[self.pattern])
        return Submit(request_id, [*self.prompt], self.params, seed=5, constraint=constraint)


_DFAS = {pattern: build_dfa(parse_regex(pattern)).to_bytes() for pattern in PATTERNS}
_PREFIX = np.random.default_rng(1).integers(10, VOCAB, 60).tolist()
token_ids = st.integers(10, VOCAB - 1)
prompts = st.one_of(
    st.lists(token_ids, min_size=1, max_size=30).map(tuple),
    st.builds(lambda shared, own: (*_PREFIX[:shared], own), st.integers(0, 60), token_ids),
)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 30),
    min_tokens=st.sampled_from([0, 0, 4]),
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    top_k=st.sampled_from([0, 0, 10]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([(), (), ((20, 5.0), (30, -100.0))]),
    stop=st.sampled_from([(), (), ("a",), ("e", "the")]),
    ignore_eos=st.booleans(),
    logprobs=st.booleans(),
    top_logprobs=st.sampled_from([0, 0, 0, 3]),
)
aborts_after = st.one_of(st.none(), st.none(), st.integers(0, 10))
jobs = st.one_of(
    st.builds(Job, prompts, params, aborts_after=aborts_after),
    st.builds(Job, prompts, params, aborts_after=aborts_after),
    st.builds(Job, prompts, params, st.sampled_from(PATTERNS), aborts_after=aborts_after),
    st.builds(
        Job,
        prompts,
        choices=st.lists(st.lists(token_ids, min_size=1, max_size=6).map(tuple), min_size=1, max_size=5).map(
            tuple
        ),
    ),
)


def run_engine(
    runner: TorchRunner, tokenizer: Tokenizer, config: SchedulerConfig, work: Sequence[Job]
) -> tuple[list[Finished | Failed], Engine]:
    """Runs the jobs to their ends on a new engine in this thread, so that the same jobs make the same batches
    on a busy machine. Returns the ends, and the engine, which is idle."""
    ends: dict[int, Finished | Failed] = {}
    num_deltas: Counter[int] = Counter()

    def deliver(messages: list[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, Progress) and message.text:
                number = message.request_id
                num_deltas[number] += 1
                if num_deltas[number] - 1 == work[number].aborts_after:
                    engine.send(Abort(number))
            elif isinstance(message, Finished | Failed):
                ends[message.request_id] = message
                if len(ends) == len(work):  # behind a batch in flight whose requests have all ended
                    if isinstance(runner, AheadRunner):
                        runner.fails_at = frozenset()
                    engine.send(Submit(len(work), [10, 11], None))
                elif len(ends) > len(work):
                    engine.send(Stop())

    engine = Engine(runner, tokenizer, config, deliver)
    if isinstance(runner, AheadRunner):
        runner.engine = engine
    for number, job in enumerate(work):
        engine.send(job.submit(number))
    engine.run()
    engine.scheduler.check_idle()
    return [ends[number] for number in range(len(work))], engine


def run_all(
    model: Model,
    work: Sequence[Job],
    config: SchedulerConfig,
    *,
    num_slots: int = NUM_SLOTS,
    ahead: bool = True,
    fails_at: frozenset[int] = frozenset(),
) -> int:
    """Runs all jobs together, and each alone, and compares their ends. Returns the number of preemptions."""
    runner = model.ahead
    runner.info = replace(runner.all_info, num_slots=num_slots, launches_ahead=ahead)
    runner.num_calls, runner.fails_at = 0, fails_at
    ends, engine = run_engine(runner, model.tokenizer, config, work)
    for job, end in zip(work, ends, strict=True):
        if isinstance(end, Finished):
            check_end(end, model.end_alone(job))
        elif end.code == Cancelled.code:
            assert job.aborts_after is not None
        else:  # out of memory
            assert (end.code, bool(fails_at)) == (EngineFailed.code, True)
    return engine.scheduler.counters.preemptions


def check_end(end: Finished, expected: Finished) -> None:
    assert (end.token_ids, end.text, end.finish_reason) == (
        expected.token_ids,
        expected.text,
        expected.finish_reason,
    )
    assert end.forced == expected.forced
    np.testing.assert_allclose(_numbers(end.logprobs), _numbers(expected.logprobs), rtol=1e-3, atol=1e-4)
    assert [[token for token, _ in top or []] for top in end.top_logprobs] == [
        [token for token, _ in top or []] for top in expected.top_logprobs
    ]


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [np.nan if value is None else value for value in values]


@pytest.mark.parametrize("ahead", [True, False])
def test_f42e_greedy_requests_have_the_tokens_of_the_cpu(model: Model, ahead: bool) -> None:
    """Prompts of several lengths, in one batch and in chunks, some with a common prefix."""
    rng = np.random.default_rng(0)
    work = [Job((*_PREFIX[: 20 * (i % 4)], *rng.integers(10, VOCAB, 3 + 17 * i).tolist())) for i in range(8)]
    before = model.ahead.num_ahead
    run_all(model, work, SchedulerConfig(token_budget=64), ahead=ahead)
    assert (model.ahead.num_ahead > before + 30) == ahead


FEATURES: list[dict[str, Any]] = [
    {"logprobs": True},
    {"top_logprobs": 3},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 20},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"logit_bias": ((20, 5.0), (30, -100.0))},
    {"stop": ("a", "e")},
    {"min_tokens": 6, "ignore_eos": False},
]


@pytest.mark.parametrize(
    ("changed", "pattern"),
    [
        # Each feature alone or with one pattern, in turn; the next test has others at random.
        pytest.param(
            changed,
            pattern,
            id=f"{pattern}-{changed}",
            marks=[] if index == (0, 1 + number // 2 % len(PATTERNS))[number % 2] else pytest.mark.full,
        )
        for number, changed in enumerate(FEATURES)
        for index, pattern in enumerate((None, *PATTERNS))
    ],
)
def test_f42e_a_feature_beside_greedy_requests(
    model: Model, changed: dict[str, Any], pattern: str | None
) -> None:
    special = Job((11, 12, 13), SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **changed}), pattern)
    run_all(model, [Job((40,)), special, Job((41, 42)), special], SchedulerConfig())


@given(
    work=st.lists(jobs, min_size=3, max_size=8),
    num_slots=st.integers(110, 200),
    max_running=st.integers(1, 6),
    token_budget=st.integers(4, 80),
    fails_at=st.frozensets(st.integers(0, 100), max_size=4),
)
def test_f42e_any_requests_have_the_results_that_they_have_alone(
    model: Model,
    work: list[Job],
    num_slots: int,
    max_running: int,
    token_budget: int,
    fails_at: frozenset[int],
) -> None:
    """With few slots, requests are preempted; some are aborted while a batch with them runs; some batches run
    out of memory, at the launch or after it, while another one is in flight."""
    config = SchedulerConfig(max_running=max_running, token_budget=token_budget)
    run_all(model, work, config, num_slots=num_slots, fails_at=fails_at)


def test_f42e_preempted_requests_have_the_results_that_they_have_alone(model: Model) -> None:
    work = [Job((20 + number,) * 8) for number in range(6)]
    assert run_all(model, work, SchedulerConfig(), num_slots=110) > 0
