"""The throughput of the engine on four workloads over a random model: with everything on, and with one part
off at a time.

The engine is the real one, with its scheduler, cache, loop and detokeniser, in this thread. Prompts are token
ids, and there is no server.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch

from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.constrained.grammar_cache import GrammarCache
from agentflow.engine.engine import Engine
from agentflow.engine.machine.resources import collect_garbage_rarely
from agentflow.engine.messages import Failed, Finished, FromEngine, Stop
from agentflow.engine.models.config import DecoderConfig
from agentflow.engine.models.device_steps import DeviceStep
from agentflow.engine.request import Objective, Origin, Submit
from agentflow.engine.runner import RunnerInfo
from agentflow.engine.scheduling.defaults import CPU_TOKEN_BUDGET, DEFAULT_POLICY, GPU_TOKEN_BUDGET
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.sampling import SamplingParams
from benchmarks.report import Report
from benchmarks.step.gpu_attention import sharing
from benchmarks.step.random_llama import RandomRunner

MAX_ROUNDS = 3
ONCE_ABOVE = 3.0
"""A setting that takes this many times as long as everything on runs only once."""


@dataclass(frozen=True)
class Setting:
    """The engine with all parts, or without the one that gives the setting its name."""

    name: str
    use_cache: bool = True
    shares_reads: bool = True  # attention reads a prefix that requests share once
    uses_graphs: bool = True
    launches_ahead: bool = True
    policy: str = DEFAULT_POLICY

    @property
    def needs_gpu(self) -> bool:
        """Whether the part exists only on a GPU."""
        return not (self.shares_reads and self.uses_graphs)


ALL_ON = Setting("all_on")
WITHOUT = (
    Setting("prefix_cache", use_cache=False),
    Setting("shared_attention", shares_reads=False),
    Setting("graphs", uses_graphs=False),
    Setting("launching_ahead", launches_ahead=False),
    Setting("fair_policy", policy="fcfs"),
)


@dataclass(frozen=True)
class Prompt:
    """A prompt of a workload."""

    token_ids: list[int]
    num_output: int  # tokens to generate
    step: int = 1  # its turn in a chat, or its depth in a tree


def _ends(prompt: Prompt, output: list[int]) -> list[Prompt]:
    return []


@dataclass(frozen=True)
class Workload:
    """Prompts that arrive together, and the prompts that follow the output of a prompt."""

    prompts: list[Prompt]
    follow: Callable[[Prompt, list[int]], list[Prompt]] = _ends
    objective: Objective = "throughput"


class Words:
    """Random token ids."""

    def __init__(self, vocab_size: int) -> None:
        self._rng = np.random.default_rng(0)
        self._vocab_size = vocab_size

    def __call__(self, num: int) -> list[int]:
        ids: list[int] = self._rng.integers(10, self._vocab_size, num).tolist()
        return ids


def few_shot(words: Words, num: int, shared: int, own: int, output: int) -> Workload:
    """Returns ``num`` questions behind the same examples."""
    examples = words(shared)
    return Workload([Prompt([*examples, *words(own)], output) for _ in range(num)])


def tree_of_thought(
    words: Words, num: int, problem: int, branching: int, depth: int, own: int, output: int
) -> Workload:
    """Returns ``num`` problems with ``branching`` thoughts each, as many on each of these, and so on."""

    def expand(token_ids: list[int], step: int) -> list[Prompt]:
        return [Prompt([*token_ids, *words(own)], output, step) for _ in range(branching)]

    def follow(prompt: Prompt, thought: list[int]) -> list[Prompt]:
        if prompt.step == depth:
            return []
        return expand([*prompt.token_ids, *thought], prompt.step + 1)

    return Workload([prompt for _ in range(num) for prompt in expand(words(problem), 1)], follow)


def chat(words: Words, num: int, turns: int, system: int, own: int, output: int) -> Workload:
    """Returns ``num`` conversations under the same system message."""
    shared = words(system)

    def follow(prompt: Prompt, answer: list[int]) -> list[Prompt]:
        if prompt.step == turns:
            return []
        return [Prompt([*prompt.token_ids, *answer, *words(own)], output, prompt.step + 1)]

    return Workload([Prompt([*shared, *words(own)], output) for _ in range(num)], follow, "latency")


def unshared(words: Words, num: int, own: int, output: int) -> Workload:
    """Returns ``num`` prompts that share nothing."""
    return Workload([Prompt(words(own), output) for _ in range(num)])


def workloads(*, is_small: bool) -> dict[str, Callable[[Words], Workload]]:
    """Returns the workloads by name. Each call of one makes the same prompts."""
    if is_small:
        return {
            "few_shot": lambda words: few_shot(words, 6, 40, 8, 3),
            "tree_of_thought": lambda words: tree_of_thought(words, 1, 30, 2, 3, 4, 3),
            "chat": lambda words: chat(words, 2, 3, 30, 6, 3),
            "unshared": lambda words: unshared(words, 4, 20, 5),
        }
    return {
        "few_shot": lambda words: few_shot(words, 128, 1_500, 200, 16),
        "tree_of_thought": lambda words: tree_of_thought(words, 2, 800, 3, 3, 24, 24),
        "chat": lambda words: chat(words, 8, 4, 1_000, 100, 24),
        "unshared": lambda words: unshared(words, 64, 500, 100),
    }


class LentRunner:
    """A random model for one engine after another."""

    def __init__(self, inner: RandomRunner, *, launches_ahead: bool) -> None:
        self._inner = inner
        config = inner.config
        self.info = RunnerInfo(
            model="random",
            vocab_size=config.vocab_size,
            max_context=config.max_context,
            num_slots=inner.num_slots,
            end_token_ids=(),
            kv_bytes_per_token=inner.pool.bytes_per_token,
            weight_bytes=inner.model.nbytes,
            weights="random weights",
            identity="random",
            launches_ahead=launches_ahead,
        )

    def launch(self, batch: Batch) -> DeviceStep:
        return self._inner.launch(batch)

    def collect(self, handle: DeviceStep) -> BatchOutput:
        return handle.output()

    def close(self) -> None:
        """Does nothing: the next engine uses the model."""


def number_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns a tokenizer whose tokens are numbers: the texts of a random model mean nothing."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {f"Ġ{number}": number for number in range(vocab_size)}
    return Tokenizer(
        {
            "version": "1.0",
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
    )


@dataclass(frozen=True)
class Run:
    """One run of a workload."""

    took_s: float
    num_output: int  # generated tokens
    num_requests: int
    hit_rate: float  # cached tokens of the prompts


def run_once(runner: RandomRunner, tokenizer: Tokenizer, workload: Workload, setting: Setting) -> Run:
    """Runs a workload on a new engine, whose cache is empty. Raises ``RuntimeError`` if a request fails."""
    is_gpu = runner.device.type == "cuda"
    pending: dict[int, Prompt] = {}
    numbers = itertools.count(1)
    num_output, ended = 0, 0.0

    def submit(prompt: Prompt) -> None:
        request_id = next(numbers)
        pending[request_id] = prompt
        engine.send(
            Submit(
                request_id=request_id,
                token_ids=prompt.token_ids,
                params=SamplingParams(max_tokens=prompt.num_output, ignore_eos=True),
                origin=Origin(objective=workload.objective),
            )
        )

    def deliver(messages: list[FromEngine]) -> None:
        nonlocal num_output, ended
        for message in messages:
            if isinstance(message, Failed):
                raise RuntimeError(f"a request failed: {message.message}")
            if isinstance(message, Finished):
                num_output += message.output_tokens
                for prompt in workload.follow(pending.pop(message.request_id), message.token_ids):
                    submit(prompt)
                if not pending:
                    ended = time.perf_counter()
                    engine.send(Stop())

    config = SchedulerConfig(
        token_budget=GPU_TOKEN_BUDGET if is_gpu else CPU_TOKEN_BUDGET,
        policy=setting.policy,
        use_cache=setting.use_cache,
    )
    lent = LentRunner(runner, launches_ahead=setting.launches_ahead)
    with _changed(setting, runner):
        engine = Engine(lent, tokenizer, config, deliver)
        began = time.perf_counter()
        for prompt in workload.prompts:
            submit(prompt)
        engine.run()
    counters = engine.scheduler.counters
    hit_rate = counters.cached_tokens / max(1, counters.prompt_tokens)
    return Run(ended - began, num_output, next(numbers) - 1, hit_rate)


@contextmanager
def _changed(setting: Setting, runner: RandomRunner) -> Iterator[None]:
    """Turns off the parts that no option of an engine turns off."""
    with ExitStack() as changes:
        # No request has a grammar, and each engine would build tables of the vocabulary.
        changes.enter_context(patch.object(GrammarCache, "prepare"))
        if not setting.uses_graphs:
            changes.enter_context(patch.object(runner.model, "_graphs", None))
        if not setting.shares_reads:
            changes.enter_context(sharing(False))
        yield


def measure(
    report: Report,
    device: torch.device,
    config: DecoderConfig,
    num_slots: int,
    write: Callable[[], None],
    *,
    is_small: bool = False,
    seconds: float = 66.0,
) -> None:
    """Measures all workloads under all settings.

    Args:
        report: gets the figures.
        device: where the model runs.
        config: the model's shape.
        num_slots: the size of the KV pool, in tokens.
        write: writes the report; called after each workload.
        is_small: measure the small workloads.
        seconds: the time for all rounds. Each workload has at least one round.
    """
    collect_garbage_rarely()  # first: objects that exist now are never collected
    runner = RandomRunner(config, num_slots, torch.bfloat16, device)
    runner.prepare()
    tokenizer = number_tokenizer(config.vocab_size)
    settings = [ALL_ON, *(one for one in WITHOUT if device.type == "cuda" or not one.needs_gpu)]
    todo = workloads(is_small=is_small)
    deadline = time.perf_counter() + seconds
    for number, (name, make) in enumerate(todo.items()):
        share_s = (deadline - time.perf_counter()) / (len(todo) - number)
        began = time.perf_counter()
        run_once(runner, tokenizer, make(Words(config.vocab_size)), ALL_ON)  # compiles kernels
        rounds: list[dict[str, Run]] = []
        slow: set[str] = set()  # the settings that run only once
        while len(rounds) < MAX_ROUNDS:
            round_began = time.perf_counter()
            runs = {}
            for setting in settings:
                if setting.name not in slow:
                    workload = make(Words(config.vocab_size))
                    runs[setting.name] = run_once(runner, tokenizer, workload, setting)
            rounds.append(runs)
            slow |= {each for each, run in runs.items() if run.took_s > ONCE_ABOVE * runs[ALL_ON.name].took_s}
            ended = time.perf_counter()
            if ended - began + (ended - round_began) > share_s:
                break
        _report(report, name, rounds)
        write()


def _report(report: Report, name: str, rounds: list[dict[str, Run]]) -> None:
    """Adds the figures of one workload."""
    base = [runs[ALL_ON.name] for runs in rounds]
    note = (
        f"{base[0].num_requests} requests, {base[0].num_output:,} tokens in "
        f"{statistics.median([run.took_s for run in base]):.2f} s, hit rate {base[0].hit_rate:.1%}"
    )
    speeds = [run.num_output / run.took_s for run in base]
    report.median(f"gpu.{name}_tokens_s", speeds, "tokens/s", note=note)
    for part in rounds[0]:
        if part == ALL_ON.name:
            continue
        pairs = [(runs[part], runs[ALL_ON.name]) for runs in rounds if part in runs]
        ratios = [run.took_s / all_on.took_s for run, all_on in pairs]
        took_s = statistics.median([run.took_s for run, _ in pairs])
        note = (
            f"time without it over the time with everything on; {took_s:.2f} s, "
            f"hit rate {pairs[0][0].hit_rate:.1%}"
        )
        report.median(f"gpu.{name}_without_{part}", ratios, "ratio", note=note)
