"""The batch that runs: whose rows it computes, and what they gave when it has run.

What a scheduler counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from agentflow.engine.batch import BatchOutput
from agentflow.engine.cache.kv_manager import KVMemory
from agentflow.engine.request import Request, TopTokens
from agentflow.engine.scheduling.batch_builder import TreeRows, Work, take_scored, targets_of
from agentflow.engine.scheduling.in_progress_prefixes import InProgressPrefixes


@dataclass(slots=True)
class Counters:
    """What happened since the start, in tokens unless the name says otherwise. ``cached_tokens`` of the
    prompts came from the cache; ``cached_output_tokens`` of these had been generated, not prompts.
    ``forced_tokens`` of the generated ones were forced by a grammar and not sampled."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_output_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    evicted_tokens: int = 0
    retractions: int = 0
    _num_recounted: int = 0

    def generated(self, change: int) -> None:
        """So many more tokens are generated. Where the same text got fewer tokens than before, fewer: that is
        made up for with those that come next, for what is counted here never falls."""
        self._num_recounted -= change
        if self._num_recounted < 0:
            self.generated_tokens -= self._num_recounted
            self._num_recounted = 0


class StepResult(NamedTuple):
    """What one step gave a request: a sampled token (None while it prefills or scores), and the
    log-probabilities of its sampled or scored tokens where they were asked for. ``tops``: the likeliest
    tokens at the place of each of them, as many as the request wants told."""

    request: Request
    token_id: int | None
    logprobs: list[float]
    tops: list[TopTokens]


class InFlight:
    """``work`` and ``trees``: the rows of requests and the nodes of trees, in the order of the batch.
    ``scored``: which of them are scored. All are empty where nothing runs."""

    def __init__(self, memory: KVMemory, prefills: InProgressPrefixes, counters: Counters) -> None:
        self.work: list[Work] = []
        self.trees: list[Work] = []
        self.scored: list[TreeRows] = []
        self._memory = memory
        self._prefills = prefills
        self._counters = counters

    def complete(self, output: BatchOutput) -> list[StepResult]:
        """The batch has run: its rows are computed now. New tokens are appended to their requests; what the
        rows of each request gave is returned."""
        token_ids = output.token_ids.tolist()
        logprobs = None if output.logprobs is None else output.logprobs.tolist()
        results: list[StepResult] = []
        next_output = 0
        for request, num_rows in self.work:
            targets = targets_of(request, num_rows)
            end = next_output + len(targets)
            in_prompt = request.num_computed < request.num_prompt
            request.num_computed += num_rows
            self._memory.num_computed += num_rows
            if in_prompt:
                self._memory.commit(request)
            self._prefills.moved(request)
            token_id = None
            if targets and targets[-1][1] < 0:
                token_id = token_ids[end - 1]
                request.tokens[request.num_tokens] = token_id
                request.num_tokens += 1
                self._counters.generated(1)
            told = [] if logprobs is None or request.tree is not None else logprobs[next_output:end]
            tops: list[TopTokens] = []
            if request.params.top_logprobs:
                tops = [output.top_of(i, request.params.top_logprobs) for i in range(next_output, end)]
            results.append(StepResult(request, token_id, told, tops))
            next_output = end
        if self.scored:
            self._complete_trees(output, results)
        self._clear()
        return results

    def _complete_trees(self, output: BatchOutput, results: list[StepResult]) -> None:
        """The same for the nodes of the batch, and what was scored."""
        take_scored(self.scored, output)
        told = {result.request.id for result in results}
        for request, num_nodes in self.trees:
            request.num_nodes_computed += num_nodes
            self._memory.num_computed += num_nodes
            self._prefills.moved(request)
            if not request.num_nodes_left:
                self._memory.release_nodes(request)
            if request.id not in told:
                results.append(StepResult(request, None, [], []))

    def by_request(self) -> list[list[Work]]:
        """The batch in parts, one for each request: all rows of its tokens and nodes."""
        rows: Counter[Request] = Counter()
        for request, num_rows in (*self.work, *self.trees):
            rows[request] += num_rows
        return [[item] for item in rows.items()]

    def halves(self) -> list[list[Work]]:
        """The batch in two parts of as many rows each; in one where it has one row."""
        items = [item for part in self.by_request() for item in part]
        left = sum(num_rows for _, num_rows in items) // 2
        first: list[Work] = []
        second: list[Work] = []
        for request, num_rows in items:
            num_here = min(num_rows, left)
            left -= num_here
            if num_here:
                first.append((request, num_here))
            if num_here < num_rows:
                second.append((request, num_rows - num_here))
        return [part for part in (first, second) if part]

    def discard(self) -> list[Request]:
        """The batch failed: its rows are not computed, its slots go back. Returns its requests."""
        for request, num_rows in self.work:
            self._memory.give_back(request, num_rows)
        for request, num_nodes in self.trees:
            self._memory.give_back_nodes(request, num_nodes)
        failed = list(dict.fromkeys([request for request, _ in (*self.work, *self.trees)]))
        self._clear()
        return failed

    def _clear(self) -> None:
        self.work, self.trees, self.scored = [], [], []
