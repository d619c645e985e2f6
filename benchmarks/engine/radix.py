"""The cost of the radix cache's operations on a tree of a million tokens, and on a tree of a tenth of this
size; and the cost of the reason why a prompt was not cached."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from rich.console import Console
from rich.progress import track

from agentflow.engine.cache.nodes import PrefixMatch
from agentflow.engine.cache.radix_cache import RadixCache
from agentflow.engine.cache.token_run import token_run
from agentflow.engine.generator.context import conversation_keys
from agentflow.engine.generator.prompt_changes import PromptChanges, outline
from agentflow.engine.request import Origin, Request, Submit
from agentflow.engine.scheduling.kv_memory import KVMemory
from agentflow.protocol.chat import Message
from benchmarks.report import Report

NUM_TOKENS, NUM_NODES = 1_000_000, 20_000
PROMPT = 2_000
RUNS = 5
KEY = "key"


class Tree:
    """A random tree whose paths branch about every 50 tokens, so that a prompt has 40 edges. ``paths``: the
    inserted sequences."""

    def __init__(self, num_tokens: int, num_nodes: int) -> None:
        self.random = random.Random(1)
        self.numbers = np.random.default_rng(1)
        self.cache = RadixCache()
        self.next_slot = 0
        self.paths: list[np.ndarray] = []
        edge = num_tokens // num_nodes
        tail = edge
        for number in track(range(num_tokens // tail), "growing a tree", transient=True):
            # Each run continues an earlier path from a random place, which usually splits an edge.
            path = self.path() if number % 32 else self.new(0)
            cuts = range(0, min(len(path), PROMPT - tail) + 1, edge // 2)
            cut = max(self.random.choice(cuts), self.random.choice(cuts))
            self.insert(np.concatenate((path[:cut], self.new(tail))))

    def new(self, length: int) -> np.ndarray:
        """Returns tokens that occur nowhere in the tree."""
        return self.numbers.integers(0, 2**31 - 1, length, dtype=np.int32)

    def path(self) -> np.ndarray:
        """Returns a random path of the tree, preferring long ones."""
        if not self.paths:
            return self.new(0)
        return max((self.random.choice(self.paths) for _ in range(4)), key=len)

    def insert(self, tokens: np.ndarray) -> PrefixMatch:
        """Performs the operations of a request: match, lock, extend, unlock."""
        run = token_run(tokens)
        slots = np.arange(self.next_slot, self.next_slot + len(tokens), dtype=np.int32)
        self.next_slot += len(tokens)
        match = self.cache.match(KEY, run)
        self.cache.lock(match)
        extended, _ = self.cache.extend(match, KEY, run, slots)
        self.cache.unlock(match)
        self.paths.append(tokens)
        return extended

    def prompt(self) -> np.ndarray:
        """Returns 2,000 tokens, of which about the first 1,900 are in the tree."""
        stem = max((self.path() for _ in range(8)), key=len)[: PROMPT - 100]
        return np.concatenate((stem, self.new(PROMPT - len(stem))))


def timed_us(work: Callable[[], object]) -> float:
    """Returns the microseconds of the call."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def measure(tree: Tree, samples: int) -> tuple[list[float], list[float], float]:
    """Returns the median microseconds of match and insert together and of evicting one node, and the mean
    depth of the matched paths in nodes."""
    match_insert, evict, depths = [], [], []
    for _ in range(RUNS):
        inserts, evictions = [], []
        for _ in range(samples):
            tokens = tree.prompt()
            inserts.append(timed_us(partial(tree.insert, tokens)))
            node, depth = tree.cache.match(KEY, token_run(tokens)).node, 0
            while node.parent is not None:
                node, depth = node.parent, depth + 1
            depths.append(depth)
            evictions.append(timed_us(lambda: tree.cache.evict(1)))
        match_insert.append(float(np.median(inserts)))
        evict.append(float(np.median(evictions)))
    return match_insert, evict, float(np.mean(depths))


class Misses:
    """A full pool with prompts of 1,000 tokens under 12 salts; half of each is a common prefix. The oldest
    prompts are evicted."""

    NUM_SALTS, COMMON, NUM_PROMPTS = 12, 500, 400

    def __init__(self) -> None:
        self.numbers = np.random.default_rng(1)
        self.common = self.tokens(self.COMMON)
        self.memory = KVMemory(num_slots=60_000, max_context=4_000, max_running=4, use_cache=True)
        self.changes = PromptChanges()
        self.prompts = [self.tokens(self.COMMON) for _ in range(self.NUM_PROMPTS)]
        for number, prompt in enumerate(self.prompts):
            request = self.request(prompt, f"{number % self.NUM_SALTS}")
            match = self.memory.match(request)
            self.memory.attach(request, match)
            row = self.memory.table.slots[request.req_row]
            row[match.num_tokens : request.num_tokens] = self.memory.allocate(
                request.num_tokens - match.num_tokens
            )
            request.num_computed = request.num_tokens
            self.memory.detach(request)

    def tokens(self, length: int) -> np.ndarray:
        """Returns random tokens."""
        return self.numbers.integers(0, 30_000, length, dtype=np.int32)

    def request(self, prompt: np.ndarray, salt: str) -> Request:
        """Returns a request for the common prefix and a prompt."""
        tokens = np.concatenate((self.common, prompt))
        return Request.of(Submit(1, [], None, origin=Origin(tenant="a", cache_salt=salt)), tokens, 0)

    def median_us(self, reason: str, samples: int) -> float:
        """Returns the median microseconds of finding the reason of one request over HTTP: the outline of its
        conversation, the comparison with the conversation's last prompt, and the search in the cache."""
        times = []
        for number in range(samples):
            prompt = self.prompts[number] if reason == "evicted" else self.tokens(self.COMMON)
            salt = "new" if reason == "salt" else f"{number % self.NUM_SALTS}"
            request = self.request(prompt, salt)
            match = self.memory.match(request)
            # Strings that were not hashed before, as from a new HTTP request.
            messages = [Message("system", "Be brief. " * 200), Message("user", f"{number} " * 400)]
            keys = conversation_keys(messages)
            start = time.perf_counter()
            outlined = outline(messages, b"", salt, keys)
            assert outlined is not None
            changed = self.changes.reason(outlined, keys)
            found = self.memory.why_missed(request, match)
            times.append((time.perf_counter() - start) * 1e6)
            self.memory.cache.unlock(match)
            if (found, changed) != (reason, ""):
                raise AssertionError(f"the reason is {found!r} ({changed!r}), not {reason!r}")
        return float(np.median(times))


def run(report: Report, console: Console, only: str) -> None:
    """Measures the figures whose id contains ``only``."""
    scale = 1 if report.scale == "full" else 10
    tree = Tree(NUM_TOKENS // scale, NUM_NODES // scale)
    num_nodes = sum(1 for _ in tree.cache.nodes())
    match_insert, evict, depth = measure(tree, 200)
    small = Tree(NUM_TOKENS // scale // 10, NUM_NODES // scale // 10)
    small_insert, small_evict, small_depth = measure(small, 200)
    console.print(f"a tree of {tree.cache.num_cached:,} tokens in {num_nodes:,} nodes")
    note = f"{num_nodes:,} nodes, {tree.cache.num_cached:,} tokens; {PROMPT} tokens along {depth:.0f} nodes"
    report.median("radix.match_insert_us", match_insert, "us", goal="<= 200", note=note)
    report.median("radix.evict_us", evict, "us", note="one leaf")
    note = "the same in a tree of a tenth of the size"
    inserts = [big / little for big, little in zip(match_insert, small_insert, strict=True)]
    evictions = [big / little for big, little in zip(evict, small_evict, strict=True)]
    report.median(
        "radix.match_insert_vs_tenth", inserts, "ratio", note=f"{note}, along {small_depth:.0f} nodes"
    )
    report.median("radix.evict_vs_tenth", evictions, "ratio", note=note)
    misses = Misses()
    note = f"why a prompt of {2 * misses.COMMON:,} tokens was not cached, {misses.NUM_SALTS} salts"
    for reason in ("first_seen", "salt", "evicted"):
        runs = [misses.median_us(reason, 40) for _ in range(RUNS)]
        report.median(f"radix.miss_{reason}_us", runs, "us", goal="<= 5", note=note)
    report.results = [result for result in report.results if only in result.id]
