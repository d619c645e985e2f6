"""The batch in flight: what it computes, and what it gives its requests once it has run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentflow.engine.batch import BatchOutput
from agentflow.engine.cache.kv_manager import KVMemory
from agentflow.engine.request import Request, TopTokens
from agentflow.engine.scheduling.batch_builder import Row, ScoredNodes, Targets, Work, store_scores
from agentflow.engine.scheduling.in_progress_prefixes import InProgressPrefixes
from agentflow.errors import BadArgument, EngineFailed, RequestRefused
from agentflow.kernels.no_choice import NO_TOKEN, NOT_FINITE


@dataclass(slots=True)
class Counters:
    """Totals since the start, in tokens unless the name says otherwise. Of the prompt tokens,
    ``cached_tokens`` came from the cache; ``cached_output_tokens`` of these had been generated. Of the
    generated tokens, ``forced_tokens`` were forced by a grammar instead of sampled. ``retractions``:
    preemptions of running requests."""

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
        """Adds generated tokens. A negative change, when the same text was encoded in fewer tokens, is set
        off against later ones, because counters must not decrease."""
        self._num_recounted -= change
        if self._num_recounted < 0:
            self.generated_tokens -= self._num_recounted
            self._num_recounted = 0


class StepResult(NamedTuple):
    """What one step gave a request: the sampled token (None while it prefills or scores), the
    log-probabilities of its sampled or scored tokens if its batch has them, for each of these tokens the
    likeliest tokens in its place, as many as the request asked for, and its embedding (float32). ``error``:
    the fault of this row; the rest of the batch is not affected. ``ranks``: of scored tokens."""

    request: Request
    token_id: int | None
    logprobs: list[float]
    tops: list[TopTokens]
    embedding: bytes = b""
    error: Exception | None = None
    ranks: Sequence[int] = ()


class InFlight:
    """``rows`` and ``trees``: the scheduled tokens of requests and nodes of trees, in the order of the batch.
    ``scored``: the rows and nodes of trees that have tokens to score. All are empty if nothing runs."""

    def __init__(self, memory: KVMemory, prefills: InProgressPrefixes, counters: Counters) -> None:
        self.rows: list[Row] = []
        self.trees: list[Work] = []
        self.scored: list[ScoredNodes] = []
        self._memory = memory
        self._prefills = prefills
        self._counters = counters

    def complete(self, output: BatchOutput) -> list[StepResult]:
        """The batch has run: appends new tokens to their requests and returns what each request got. A fault
        in one row is that row's result. If this raises, the batch is still in flight: ``discard`` it."""
        token_ids = output.token_ids.tolist()
        has_faults = min(token_ids, default=0) < 0
        logprobs = None if output.logprobs is None else output.logprobs.tolist()
        if self.scored:
            store_scores(self.scored, output)
        rows, trees = self.rows, self.trees
        self._clear()
        results: dict[int, StepResult] = {}
        next_output = 0
        for request, num_tokens, targets in rows:
            first = next_output
            next_output += len(targets)
            in_prompt = request.num_computed < request.num_prompt
            request.num_computed += num_tokens
            self._memory.num_computed += num_tokens
            try:
                if has_faults:
                    self._check(request, token_ids[first:next_output])
                if in_prompt:
                    self._memory.commit(request)
                self._prefills.advanced(request)
                results[request.id] = self._result(request, targets, first, output, token_ids, logprobs)
            except Exception as error:
                results[request.id] = StepResult(request, None, [], [], error=error)
        for request, num_nodes in trees:
            first = next_output
            next_output += num_nodes
            request.num_nodes_computed += num_nodes
            self._memory.num_computed += num_nodes
            result = results.setdefault(request.id, StepResult(request, None, [], []))
            try:
                self._prefills.advanced(request)
                if not request.num_nodes_left:
                    self._memory.release_nodes(request)
                if has_faults:
                    self._check(request, token_ids[first:next_output])
            except Exception as error:
                results[request.id] = result._replace(error=error)
        return [*results.values()]

    def _check(self, request: Request, token_ids: list[int]) -> None:
        """Raises the error of a request if one of its rows has no token."""
        if NOT_FINITE in token_ids:
            # The keys and values of this step may be affected too, and must not reach the cache.
            assert request.committed is not None
            self._memory.roll_back(request, request.committed.num_tokens)
            raise EngineFailed(
                "the model computed numbers that are not finite (NaN or infinity): its files are damaged, or "
                "its values exceed the type that it runs in (try dtype bfloat16 or float32)"
            )
        if NO_TOKEN not in token_ids:
            return
        if request.num_generated < request.params.min_tokens:
            raise BadArgument(
                "min_tokens forbids the tokens that end the text, and no other token may follow",
                param="min_tokens",
            )
        raise RequestRefused("no token may follow: the constraint excludes all of them")

    def _result(
        self,
        request: Request,
        targets: Targets,
        first: int,
        output: BatchOutput,
        token_ids: list[int],
        all_logprobs: list[float] | None,
    ) -> StepResult:
        """The result of one row, whose outputs begin at ``first``. Appends its sampled token."""
        end = first + len(targets)
        token_id = None
        if targets and targets[-1][1] < 0:
            token_id = token_ids[end - 1]
            request.tokens[request.num_tokens] = token_id
            request.num_tokens += 1
            self._counters.generated(1)
        logprobs = [] if all_logprobs is None or request.tree is not None else all_logprobs[first:end]
        tops: list[TopTokens] = []
        if request.params.top_logprobs:
            tops = [output.top_of(i, request.params.top_logprobs) for i in range(first, end)]
        embedding = b""
        if targets and output.embeddings is not None:
            embedding = output.embeddings[end - 1].tobytes()
        ranks: Sequence[int] = ()
        if request.score_from and output.ranks is not None:
            ranks = output.ranks[first:end].tolist()
        return StepResult(request, token_id, logprobs, tops, embedding, ranks=ranks)

    def discard(self) -> list[Request]:
        """The batch failed: frees its slots and returns its requests."""
        for request, num_tokens, _ in self.rows:
            self._memory.give_back(request, num_tokens)
        for request, num_nodes in self.trees:
            self._memory.give_back_nodes(request, num_nodes)
        failed = list(dict.fromkeys([*(row[0] for row in self.rows), *(one for one, _ in self.trees)]))
        self._clear()
        return failed

    def by_request(self) -> list[Work]:
        """What the batch computes of each request: all its tokens and nodes."""
        num_tokens: Counter[Request] = Counter()
        for request, num, _ in self.rows:
            num_tokens[request] += num
        for request, num in self.trees:
            num_tokens[request] += num
        return [*num_tokens.items()]

    def _clear(self) -> None:
        self.rows, self.trees, self.scored = [], [], []


def divided(work: Sequence[Work], num_tokens: int) -> list[list[Work]]:
    """The work as parts of at most ``num_tokens`` tokens and nodes each."""
    parts: list[list[Work]] = [[]]
    room = num_tokens
    for request, num_left in work:
        while num_left:
            if not room:
                parts.append([])
                room = num_tokens
            num_here = min(num_left, room)
            parts[-1].append((request, num_here))
            num_left -= num_here
            room -= num_here
    return parts
