"""The cost of masks and compilation without a model: the engine's DFAs and three libraries.

Libraries that are not installed are skipped. xgrammar requires triton, which a CPU installation excludes:
``pip install --no-deps xgrammar apache-tvm-ffi`` suffices here.
"""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentflow.engine.constrained.grammar_cache import GrammarCache
from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.grammar import Grammar, Matcher
from agentflow.engine.grammar.token_dfa import DfaMatcher
from agentflow.engine.store.model_store import resolve_model
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.constraint import Constraint
from benchmarks.report import Report

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "city": {"enum": ["Paris", "London", "New York"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "is_active": {"type": "boolean"},
        "score": {"type": "number"},
    },
    "required": ["name", "age", "city", "tags", "is_active", "score"],
    "additionalProperties": False,
}
INSTANCES: list[dict[str, Any]] = [
    {"name": "Ada Lovelace", "age": 36, "city": "London", "tags": ["math", "poetry"], "is_active": False},
    {"name": "Blaise Pascal", "age": 39, "city": "Paris", "tags": [], "is_active": False},
    {
        "name": "Grace Hopper",
        "age": 85,
        "city": "New York",
        "tags": ["navy", "COBOL", "naïve"],
        "is_active": True,
    },
]
TEXTS = [json.dumps({**instance, "score": 4.5}, ensure_ascii=False) for instance in INSTANCES]


@dataclass
class Costs:
    """The times of one library."""

    compile_s: float = 0.0  # the cold compilation
    step_s: list[float] = field(default_factory=list)  # each warm step: a token, and the next mask
    first_mask_s: list[float] = field(default_factory=list)  # each mask that was computed for the first time


Step = tuple[Callable[[], object], Callable[[int], object]]
"""The functions of one text's matcher: one computes the next mask, the other accepts a token."""


def walk(costs: Costs, start: Callable[[], Step], texts: Sequence[Sequence[int]], repeats: int) -> None:
    """Measures the steps of all texts, which are cold in the first round."""
    for number in range(repeats + 1):
        for ids in texts:
            mask, accept = start()
            mask()
            for token in ids[:-1]:
                began = time.perf_counter()
                accept(token)
                mask()
                elapsed = time.perf_counter() - began
                if number:
                    costs.step_s.append(elapsed)


def ours(tokenizer: Tokenizer, texts: Sequence[Sequence[int]], repeats: int) -> tuple[Costs, float]:
    """Returns the engine's times, and the seconds for compiling the same constraint again, which the cache
    finds by its key."""
    costs = Costs()
    constraint = Constraint("schema", json.dumps(SCHEMA))
    grammars = GrammarCache(tokenizer, tokenizer.vocab_size)
    _ = grammars.vocabulary
    began = time.perf_counter()
    compiled: CompiledConstraint = compile_constraint(constraint)
    grammar = grammars.grammar(compiled)
    costs.compile_s = time.perf_counter() - began
    began = time.perf_counter()
    grammars.grammar(compiled)
    again_s = time.perf_counter() - began

    def start() -> Step:
        matcher: Matcher = grammar.matcher()
        return matcher.mask, matcher.accept

    _time_first_masks(costs, grammar, texts)
    walk(costs, start, texts, repeats)
    return costs, again_s


def _time_first_masks(costs: Costs, grammar: Grammar, texts: Sequence[Sequence[int]]) -> None:
    """Measures the first mask of every state that the texts visit."""
    seen: set[int] = set()
    for ids in texts:
        matcher = grammar.matcher()
        assert isinstance(matcher, DfaMatcher)
        for token in ids:
            began = time.perf_counter()
            matcher.mask()
            elapsed = time.perf_counter() - began
            if matcher.state not in seen:
                seen.add(matcher.state)
                costs.first_mask_s.append(elapsed)
            matcher.accept(token)


def llguidance(tokenizer: Tokenizer, texts: Sequence[Sequence[int]], repeats: int) -> Costs:
    """Measures llguidance, with the same tokenizer."""
    from llguidance import LLMatcher
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    from agentflow.engine.grammar.llguidance import LlguidanceVocabulary

    costs = Costs()
    ll = LlguidanceVocabulary(tokenizer, tokenizer.vocab_size).ll_tokenizer
    bitmask = allocate_token_bitmask(1, ll.vocab_size)
    options: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    began = time.perf_counter()
    source = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), defaults=options)
    LLMatcher(ll, source)
    costs.compile_s = time.perf_counter() - began

    def start() -> Step:
        matcher = LLMatcher(ll, source)
        return lambda: fill_next_token_bitmask(matcher, bitmask, 0), matcher.consume_token

    walk(costs, start, texts, repeats)
    return costs


def xgrammar(tokenizer: Tokenizer, texts: Sequence[Sequence[int]], repeats: int) -> Costs:
    """Measures xgrammar, with the same separators."""
    xgr = importlib.import_module("xgrammar")
    costs = Costs()
    vocabulary = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    ends = [tokenizer.eos_id] if tokenizer.eos_id is not None else []
    info = xgr.TokenizerInfo(vocabulary, xgr.VocabType.RAW, stop_token_ids=ends)
    compiler = xgr.GrammarCompiler(info, max_threads=2, cache_enabled=False)
    began = time.perf_counter()
    compiled = compiler.compile_json_schema(
        json.dumps(SCHEMA), any_whitespace=False, separators=(", ", ": "), strict_mode=True
    )
    costs.compile_s = time.perf_counter() - began
    bitmask = xgr.allocate_token_bitmask(1, tokenizer.vocab_size)

    def start() -> Step:
        matcher = xgr.GrammarMatcher(compiled)
        return lambda: matcher.fill_next_token_bitmask(bitmask, 0), matcher.accept_token

    walk(costs, start, texts, repeats)
    return costs


def outlines_core(tokenizer: Tokenizer, texts: Sequence[Sequence[int]], repeats: int) -> Costs:
    """Measures outlines-core, with the regular expression that it derives from the schema and its index of
    all states."""
    outlines = importlib.import_module("outlines_core")
    kernels = importlib.import_module("outlines_core.json_schema")
    costs = Costs()
    tokens: dict[bytes, list[int]] = {}
    for i in range(tokenizer.vocab_size):
        if data := tokenizer.token_bytes(i):
            tokens.setdefault(data, []).append(i)
    vocabulary = outlines.Vocabulary(tokenizer.eos_id, tokens)
    began = time.perf_counter()
    regex = kernels.build_regex_from_schema(json.dumps(SCHEMA), whitespace_pattern=" ?")
    index = outlines.Index(regex, vocabulary)
    costs.compile_s = time.perf_counter() - began
    words = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)

    def start() -> Step:
        guide = outlines.Guide(index)
        fill = lambda: guide.write_mask_into(words.ctypes.data, words.size, 4)  # noqa: E731
        return fill, lambda token: guide.advance(token, return_tokens=False)

    walk(costs, start, texts, repeats)
    return costs


PEERS = {"llguidance": llguidance, "xgrammar": xgrammar, "outlines-core": outlines_core}


def measure_masks(report: Report) -> None:
    """Measures compilation and masks of the schema with six fields."""
    repeats = 30 if report.scale == "full" else 5
    tokenizer = Tokenizer.from_folder(Path(resolve_model("smollm2-135m")))
    texts = [tokenizer.encode(text, continues=True) for text in TEXTS]
    compile_constraint(Constraint("regex", "warm"))  # modules that are imported once
    colds: list[float] = []
    for _ in range(5):
        costs, again_s = ours(tokenizer, texts, repeats)
        colds.append(costs.compile_s * 1e3)
    peers = _peers(tokenizer, texts, repeats)
    mask_us = sorted(s * 1e6 for s in costs.step_s)
    p99 = mask_us[int(0.99 * len(mask_us))]
    note = "accepting a token and computing the next mask; " + "; ".join(
        f"{name} {_median_us(peer):.3g} µs (99th percentile {_p99_us(peer):.3g})"
        for name, peer in peers.items()
    )
    report.add("constrained.mask_us_p50", _round(statistics.median(mask_us)), "µs", note=note, goal="<= 10")
    report.add("constrained.mask_us_p99", _round(p99), "µs", goal="<= 200")
    first_ms = [s * 1e3 for s in costs.first_mask_s]
    note = f"the slowest of {len(first_ms)} states; median {statistics.median(first_ms):.2g} ms"
    report.add("constrained.first_mask_ms", _round(max(first_ms)), "ms", note=note, goal="<= 1")
    note = "; ".join(f"{name} {peer.compile_s * 1e3:.3g} ms" for name, peer in peers.items())
    report.median("constrained.compile_cold_ms", colds, "ms", note=note, goal="<= 50")
    again_ms = _round(again_s * 1e3)
    report.add("constrained.compile_again_ms", again_ms, "ms", note="found by its key", goal="<= 1")


def _peers(tokenizer: Tokenizer, texts: Sequence[Sequence[int]], repeats: int) -> dict[str, Costs]:
    found: dict[str, Costs] = {}
    for name, measure in PEERS.items():
        try:
            found[name] = measure(tokenizer, texts, repeats)
        except ImportError:
            continue
    return found


def _median_us(costs: Costs) -> float:
    return statistics.median(costs.step_s) * 1e6


def _p99_us(costs: Costs) -> float:
    return sorted(costs.step_s)[int(0.99 * len(costs.step_s))] * 1e6


def _round(value: float) -> float:
    return float(f"{value:.3g}")
