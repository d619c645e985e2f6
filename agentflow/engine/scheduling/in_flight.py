"""The work that has begun: batches in flight and their results, and prompts that are being computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from agentflow.engine.batch import BatchOutput
from agentflow.engine.request import SAMPLED_ONCE, CacheKey, Request, Row, Work
from agentflow.engine.scheduling.kv_memory import KVMemory
from agentflow.engine.scheduling.rows.select import ScoredNodes, num_scored_nodes, scored_nodes, store_scores
from agentflow.engine.scheduling.step_limits import StepFeatures
from agentflow.errors import BadArgument, EngineFailed, RequestRefused
from agentflow.kernels.sampling.no_choice import NO_TOKEN, NOT_FINITE

COMMIT_RUN = 64
"""Tokens enter the cache in runs of at least this many. The rest of a prompt enters when it is computed, the
rest of the generated tokens when their request ends. Tokens of a prompt that another request waits for enter
after each step."""


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0  # of admitted requests, except the extra ones (``Origin.is_extra``)
    cached_tokens: int = 0  # of the prompt tokens: they came from the cache
    cached_output_tokens: int = 0  # of the cached tokens: they had been generated
    computed_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0  # of the generated tokens of ended requests: a grammar forced all of their bytes
    evicted_tokens: int = 0
    preemptions: int = 0  # of running requests
    _num_recounted: int = 0  # a decrease of ``generated_tokens`` that later tokens are set off against

    def generated(self, change: int) -> None:
        """Adds generated tokens. A negative change, when the same text was encoded in fewer tokens, is set
        off against later ones, because counters must not decrease."""
        self._num_recounted -= change
        if self._num_recounted < 0:
            self.generated_tokens -= self._num_recounted
            self._num_recounted = 0


@dataclass(slots=True)
class Launched:
    """A batch that was scheduled and has not completed."""

    rows: list[Row]
    scored: list[ScoredNodes]  # the rows and nodes of trees that have tokens to score
    features: Callable[[], StepFeatures]  # makes its costs, for ``StepCost``


class InFlight:
    """The batches in flight, oldest first. Usually there is one at most; a runner that launches ahead has
    two.

    A request counts the tokens of its rows as computed, and their sampled tokens as pending, from the launch
    on. ``complete`` makes them final; ``discard`` and ``withdraw`` undo the count.

    ``launched``: the batches. Other modules read it.
    """

    def __init__(self, memory: KVMemory, prefills: InProgressPrefixes, counters: Counters) -> None:
        self.launched: deque[Launched] = deque()
        self._memory = memory
        self._prefills = prefills
        self._counters = counters

    def launch(self, rows: list[Row], features: Callable[[], StepFeatures], *, is_scored: bool) -> None:
        """The batch of these rows is launched, after the batches in flight. ``is_scored``: it scores
        tokens of trees."""
        scored: list[ScoredNodes] = []
        if is_scored:
            scored = scored_nodes(rows, [row for row in rows if row.num_nodes])
        for row in rows:
            request = row.request
            request.num_computed = row.end
            if row.num_nodes:
                request.num_nodes_computed += row.num_nodes
            request.num_pending += row.num_sampled
            if request.wants_scores:
                request.num_scored += len(row.targets)
        self.launched.append(Launched(rows, scored, features))

    def complete(self, output: BatchOutput) -> list[Row]:
        """The oldest batch has run: appends new tokens to their requests. Returns its rows with their
        results, without rows of requests that left it. A fault in one row is that row's error. If this
        raises, the batch is still in flight: ``discard`` it."""
        token_ids = output.token_ids.tolist()
        has_faults = min(token_ids, default=0) < 0
        launched = self.launched[0]
        if launched.scored:
            store_scores(launched.scored, output)
        has_logprobs = output.logprobs is not None
        self.launched.popleft()  # not before: ``discard`` needs it after a fault of the whole batch
        has_prefills, awaited = bool(self._prefills.requests), self._prefills.awaited
        rows: list[Row] = []
        next_output = num_computed = num_generated = 0
        for row in launched.rows:
            first = next_output
            next_output += 1 if row.targets is SAMPLED_ONCE else len(row.targets)
            if row.withdrawn_slots is not None:
                self._memory.slots.release(row.withdrawn_slots)
                continue
            rows.append(row)
            request = row.request
            num_computed += row.num_tokens + row.num_nodes
            request.num_pending -= row.num_sampled
            try:
                if has_faults:
                    self._check(request, token_ids[first:next_output])
                assert request.committed is not None
                is_prompt = row.start < request.num_prompt or row.num_tokens > 1
                is_long = row.end - request.committed.num_tokens >= COMMIT_RUN
                if is_long or (is_prompt and self._is_needed(row)):
                    self._memory.commit(request, row.end)
                    awaited.discard(request.id)
                if has_prefills:
                    self._prefills.advanced(request, row.end, row.first_node)
                if row.targets is SAMPLED_ONCE:
                    row.token_ids = token_ids[first:next_output]
                    request.tokens[request.num_tokens] = token_ids[first]
                    request.num_tokens += 1
                    num_generated += 1
                elif row.targets:
                    self._read(row, first, output, token_ids)
                if has_logprobs and request.tree is None:
                    row.output, row.first_output = output, first
            except Exception as error:
                row.error = error
        self._memory.num_computed += num_computed
        self._counters.generated(num_generated)
        for row in [row for row in launched.rows if row.num_nodes]:
            first = next_output
            next_output += num_scored_nodes(row)
            if row.withdrawn_slots is not None:
                continue
            request, num_nodes = row.request, row.first_node + row.num_nodes
            try:
                self._prefills.advanced(request, row.end, num_nodes)
                if num_nodes == request.num_nodes:
                    self._memory.release_nodes(request)
                if has_faults:
                    self._check(request, token_ids[first:next_output])
            except Exception as error:
                row.error = error
        return rows

    def _is_needed(self, row: Row) -> bool:
        """Whether a few tokens of a prompt enter the cache now: its last ones, or if others wait for them."""
        request = row.request
        is_last = row.end >= request.num_prompt - 1
        return is_last or request.tree is not None or request.id in self._prefills.awaited

    def _check(self, request: Request, token_ids: list[int]) -> None:
        """Raises the error of a request if one of its rows has no token."""
        if NOT_FINITE in token_ids:
            # The keys and values of this step may be affected too, and must not reach the cache.
            assert request.committed is not None
            self.withdraw(request)
            self._memory.roll_back(request, request.committed.num_tokens)
            raise EngineFailed(
                "the model computed numbers that are not finite (NaN or infinity): its files are damaged, or "
                "its values exceed the type that it runs in (try dtype bfloat16 or float32)"
            )
        if NO_TOKEN not in token_ids:
            return
        if request.mask_error is not None:
            raise request.mask_error
        if request.num_generated < request.params.min_tokens:
            raise BadArgument(
                "min_tokens forbids the tokens that end the text, and no other token may follow",
                param="min_tokens",
            )
        raise RequestRefused("no token may follow: the constraint excludes all of them")

    def _read(self, row: Row, first: int, output: BatchOutput, token_ids: list[int]) -> None:
        """Stores the results of a row, whose outputs begin at ``first``, and appends its sampled tokens."""
        request, num_sampled = row.request, row.num_sampled
        end = first + len(row.targets)
        if num_sampled:
            row.token_ids = token_ids[end - num_sampled : end]
            request.tokens[request.num_tokens : request.num_tokens + num_sampled] = row.token_ids
            request.num_tokens += num_sampled
            self._counters.generated(num_sampled)
        if output.embeddings is not None:
            row.embedding = output.embeddings[end - 1].tobytes()
        if request.score_from and output.ranks is not None:
            row.ranks = output.ranks[first:end].tolist()

    def discard(self) -> list[Request]:
        """Discards all batches in flight: the oldest failed, and the later ones continue it. Restores their
        requests to their state before the launches. Returns the requests of the oldest batch."""
        failed = [request for request, _ in self.oldest_work()]
        while self.launched:
            for row in self.launched.pop().rows:
                if row.withdrawn_slots is None:
                    self._withdraw_row(row)
                assert row.withdrawn_slots is not None
                self._memory.slots.release(row.withdrawn_slots)
        return failed

    def withdraw(self, request: Request) -> None:
        """The request leaves all batches in flight. Its slots there become free when these complete."""
        for launched in reversed(self.launched):
            for row in launched.rows:
                if row.request is request and row.withdrawn_slots is None:
                    self._withdraw_row(row)

    def _withdraw_row(self, row: Row) -> None:
        request = row.request
        request.num_pending -= row.num_sampled
        if request.wants_scores:
            request.num_scored -= len(row.targets)
        row.withdrawn_slots = self._memory.withdraw_slots(request, row.num_tokens, row.num_nodes)

    def oldest_work(self) -> list[Work]:
        """The requests of the oldest batch, with the number of their tokens and nodes in it."""
        if not self.launched:
            return []
        rows = [row for row in self.launched[0].rows if row.withdrawn_slots is None]
        return [(row.request, row.num_tokens + row.num_nodes) for row in rows]


_NextToken = tuple[CacheKey, int, int]  # cache key, position and id of the next token that is not cached


class InProgressPrefixes:
    """Running requests with more than one token to compute, and selects until they are done, in the order in
    which they were admitted. A request leaves when its last chunk has run.

    Waiting requests need not compute the prefixes of these requests too. A prefix in progress is found by its
    next token that is not cached. A waiting request that needs the same token next has the same prefix
    cached, because running requests commit their prompts to the cache step by step while others wait for
    them.

    ``requests``: the requests by id. ``awaited``: the ids of requests that others have waited for since their
    last tokens entered the cache. Other modules read them.
    """

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        self.awaited: set[int] = set()
        self._next_tokens: dict[int, _NextToken] = {}  # by id, of requests that others may wait for
        self._at: dict[_NextToken, list[Request]] = {}

    def will_compute(self, request: Request, match: int) -> bool:
        """Whether a running request is about to compute the first token that ``request``, of which ``match``
        tokens are cached, could then take from the cache. Only requests that compute ahead wait for one that
        computes ahead, because it gets few tokens of a step."""
        here = self._at.get((request.cache_key, match, request.cached_id(match)))
        if here is None or match >= request.num_reusable:
            return False
        run = request.run(match)
        is_ahead = request.origin.is_ahead
        for other in here:
            if (is_ahead or not other.origin.is_ahead) and other.run(match) == run:
                self.awaited.add(other.id)
                return True
        return False

    def add(self, request: Request) -> None:
        """The request was just admitted."""
        assert request.committed is not None
        next_index = request.committed.num_tokens
        if request.num_tokens - next_index <= 1 and request.tree is not None:
            self.requests[request.id] = request  # only one token or nodes are left: not worth waiting for
            return
        next_token = (request.cache_key, next_index, request.cached_id(next_index))
        self.requests[request.id], self._next_tokens[request.id] = request, next_token
        here = self._at.get(next_token)
        if here is None:
            self._at[next_token] = [request]
        else:
            here.append(request)

    def advanced(self, request: Request, num_tokens: int, num_nodes: int) -> None:
        """The request has computed its first ``num_tokens`` tokens and ``num_nodes`` nodes. Removes it if at
        most one token is left (for a select: none). Unknown requests are ignored."""
        if request.id not in self.requests:
            return
        self._leave(request)
        if request.num_left_after(num_tokens, num_nodes) > (1 if request.tree is None else 0):
            self.add(request)  # keeps its position in the order
        else:
            del self.requests[request.id]
            self.awaited.discard(request.id)

    def discard(self, request: Request) -> None:
        """The request no longer runs. Unknown requests are ignored."""
        if self.requests.pop(request.id, None) is not None:
            self.awaited.discard(request.id)
            self._leave(request)

    def _leave(self, request: Request) -> None:
        next_token = self._next_tokens.pop(request.id, None)
        if next_token is None:
            return
        here = self._at[next_token]
        if len(here) == 1:
            del self._at[next_token]
        else:
            here.remove(request)
