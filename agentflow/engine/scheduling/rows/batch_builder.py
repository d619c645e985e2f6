"""Builds a ``Batch`` from rows: some tokens of each request, then some nodes of selects.

The number of numpy calls does not depend on the number of requests; per request only Python lists grow.

A ``SamplingTable`` has the sampling parameters of running requests, as arrays indexed by their row of
``req_to_token``. They are written once, when a request starts to run; each step gathers them for the rows of
logits that it samples. Most requests need only one number in each array. *Special* requests edit logits:
their data is rebuilt in each step, and steps without them skip this.

In most steps each running request decodes one token, none begins, and none ends. The next batch is then known
except for its token ids and its new slots, so ``NextDecode`` builds it during the forward pass instead of
between two. It changes no decision: it is used only if the scheduler would plan and build the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.batch import (
    Batch,
    BatchAdapters,
    BatchMedia,
    FloatArray,
    IntArray,
    LogitEdits,
    MaskWords,
    PendingTokens,
    SampledRows,
    ScoredTokens,
    TokenMasks,
    TreeAttention,
)
from agentflow.engine.cache.nodes import SlotArray
from agentflow.engine.cache.prefix_readers import SharedPrefix
from agentflow.engine.grammar.grammar import TokenWords
from agentflow.engine.request import SAMPLED_ONCE, Request, Row
from agentflow.engine.scheduling.kv_memory import KVMemory, SlotTable
from agentflow.engine.scheduling.rows.select import add_nodes, scored_nodes, scored_tokens


def build_batch(
    rows: Sequence[Row],
    slots: NDArray[np.int32],
    table: SlotTable,
    shared: Sequence[SharedPrefix],
    sampling: SamplingTable,
    before: Sequence[Row] = (),
) -> Batch:
    """Builds the batch of ``rows``, which are in the order of ``make_rows``.

    Args:
        rows: The rows of the batch.
        slots: [T] for all tokens, then for all nodes, in the order of the rows. They are written to
            ``table``, or for nodes to their requests.
        table: The table of slots.
        shared: The prefixes that running requests share.
        sampling: The parameters of the running requests.
        before: The rows of the batch before this one, if it is in flight.
    """
    work = [row for row in rows if row.num_tokens] if rows and not rows[-1].num_tokens else rows
    trees = [row for row in rows if row.num_nodes]
    num_tokens = [row.num_tokens for row in work]
    num_single = num_tokens.count(1)
    starts = np.array([row.start for row in work], dtype=np.int64)
    req_rows = np.array([row.request.req_row for row in work], dtype=np.int64)
    query_lens = np.array(num_tokens, dtype=np.int64)
    token_ids = _next_tokens(work, num_single)
    positions, rows_of_tokens = starts, req_rows
    if num_single < len(work):
        first_tokens = np.cumsum(query_lens) - query_lens
        positions = np.arange(len(token_ids)) + np.repeat(starts - first_tokens, query_lens)
        rows_of_tokens = np.repeat(req_rows, query_lens)
    kv_lens = starts + query_lens
    changes = table.write_tokens(rows_of_tokens, positions, slots[: len(token_ids)])
    sampled = _sampled_rows(work, req_rows, query_lens, kv_lens, sampling, trees)
    tree_attention: TreeAttention | None = None
    if trees:
        nodes, node_positions, tree_attention = add_nodes(trees, slots[len(token_ids) :])
        token_ids = np.concatenate((token_ids, nodes))
        positions = np.concatenate((positions, node_positions))
    return Batch(
        token_ids=token_ids,
        positions=positions,
        write_slots=slots.astype(np.int64),
        req_to_token=table.slots,
        req_rows=req_rows,
        query_lens=query_lens,
        kv_lens=kv_lens,
        num_decode=num_single,
        sampled=sampled,
        trees=tree_attention,
        adapters=_find_adapters(work, trees) if _are_among(sampling.adapted, rows) else None,
        media=_find_media(work, trees, positions) if _are_among(sampling.with_media, rows) else None,
        pending=_pending_tokens(work[:num_single], before) if before else None,
        shared=shared,
        changes=changes,
    )


def _are_among(req_rows: set[int], rows: Sequence[Row]) -> bool:
    """Whether a request in one of these rows of the table is in the batch."""
    return bool(req_rows) and any(row.request.req_row in req_rows for row in rows)


def _pending_tokens(singles: Sequence[Row], before: Sequence[Row]) -> PendingTokens | None:
    """Which of the single tokens the previous batch samples, and in which of its outputs."""
    awaited = {row.request: index for index, row in enumerate(singles) if row.start == row.request.num_tokens}
    if not awaited:
        return None
    inputs: list[int] = []
    outputs: list[int] = []
    num_outputs = 0
    for row in before:
        num_outputs += len(row.targets)
        index = awaited.get(row.request)
        if index is not None and row.num_sampled:
            inputs.append(index)
            outputs.append(num_outputs - 1)
    return PendingTokens(np.array(inputs, dtype=np.int64), np.array(outputs, dtype=np.int64))


def _find_adapters(work: Sequence[Row], trees: Sequence[Row]) -> BatchAdapters:
    """The adapters of the scheduled tokens."""
    indices: dict[str, int] = {}
    of_requests: list[int] = []
    for row in (*work, *trees):
        adapter = row.request.adapter
        of_requests.append(indices.setdefault(adapter, len(indices)) if adapter else -1)
    counts = np.array([*(row.num_tokens for row in work), *(row.num_nodes for row in trees)], dtype=np.int64)
    return BatchAdapters(tuple(indices), np.repeat(np.array(of_requests, dtype=np.int64), counts))


def _find_media(work: Sequence[Row], trees: Sequence[Row], positions: IntArray) -> BatchMedia:
    """The media of the scheduled tokens, whose indices in their sequences are ``positions``."""
    num_axes = max(len(row.request.media.rope) for row in (*work, *trees) if row.request.media.runs)
    rope = np.repeat(positions[np.newaxis], num_axes, axis=0)
    of_tokens: IntArray = np.full(len(positions), -1, dtype=np.int64)
    feature_rows: IntArray = np.zeros(len(positions), dtype=np.int64)
    identities: dict[str, int] = {}
    both_ways: list[tuple[int, int]] = []
    first = 0
    for row in work:
        request = row.request
        if request.media.runs:
            rope[:, first : first + row.num_tokens] = request.media.rope_between(row.start, row.end)
            for run in request.media.runs:
                start, end = max(run.start, row.start), min(run.end, row.end)
                if start < end:
                    here = slice(first + start - row.start, first + end - row.start)
                    of_tokens[here] = identities.setdefault(run.identity, len(identities))
                    feature_rows[here] = run.first + np.arange(start - run.start, end - run.start)
                    if run.sees_all:
                        both_ways.append((here.start, here.stop))
        first += row.num_tokens
    for row in trees:
        request = row.request
        if request.media.runs:  # nodes are text after the prompt
            shift = request.media.rope[:, -1:] - request.num_prompt
            rope[:, first : first + row.num_nodes] = positions[first : first + row.num_nodes] + shift
        first += row.num_nodes
    spans = np.array(both_ways, dtype=np.int64) if both_ways else None
    return BatchMedia(rope, tuple(identities), of_tokens, feature_rows, spans)


def _next_tokens(work: Sequence[Row], num_single: int) -> IntArray:
    """The scheduled tokens in order; the first ``num_single`` rows have one each. The id of a pending token
    is arbitrary."""
    token_ids = np.array([row.request.tokens[row.start] for row in work[:num_single]], dtype=np.int64)
    if num_single == len(work):
        return token_ids
    prefilled = [row.request.tokens[row.start : row.end] for row in work[num_single:]]
    return np.concatenate((token_ids, *prefilled), dtype=np.int64)


def _all_sampled_once(rows: Sequence[Row]) -> bool:
    """Whether each row is one token, after which one is sampled, as in most steps."""
    return [row.targets for row in rows].count(SAMPLED_ONCE) == len(rows)


def _sampled_rows(
    work: Sequence[Row],
    req_rows: IntArray,
    query_lens: IntArray,
    kv_lens: IntArray,
    sampling: SamplingTable,
    trees: Sequence[Row],
) -> SampledRows:
    """The targets of all rows. In most steps each row samples after its last token."""
    if not trees and _all_sampled_once(work):
        return sampling.sampled_rows(sampling.indices[: len(work)], req_rows, kv_lens)
    if trees or any(len(row.targets) > 1 or (row.targets and row.targets[0][1] >= 0) for row in work):
        return _scored_and_sampled_rows(work, trees, sampling)
    chosen = np.array([index for index, row in enumerate(work) if row.targets], dtype=np.int64)
    rows: IntArray = query_lens.cumsum() - 1
    return sampling.sampled_rows(rows[chosen], req_rows[chosen], kv_lens[chosen])


def _scored_and_sampled_rows(
    work: Sequence[Row], trees: Sequence[Row], sampling: SamplingTable
) -> SampledRows:
    """The targets of all rows if some tokens are scored. For nodes, the first target of each that has one."""
    rows: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    positions: list[int] = []
    first_rows: list[int] = []  # of each of ``scored_nodes``
    has_targets = False  # not if all nodes are inside of heads: a runner then scores nothing
    first_token = 0
    for row in work:
        for index, target in row.targets:
            if row.request.tree is not None:
                first_rows.append(len(rows))
                has_targets = True
            rows.append(first_token + index)
            targets.append(target)
            owners.append(row.request.req_row)
            positions.append(row.start + index + 1)
        first_token += row.num_tokens
    for row in trees:
        tree, first, num_nodes = row.request.tree, row.first_node, row.num_nodes
        assert tree is not None
        scored = tree.scored_between(1 + first, 1 + first + num_nodes)
        nodes = scored - 1
        first_rows.append(len(rows))
        has_targets = has_targets or len(scored) > 0
        rows += (nodes + (first_token - first)).tolist()
        targets += tree.targets[tree.first_targets[scored]].tolist()
        owners += [row.request.req_row] * len(nodes)
        positions += (tree.depths[nodes] + row.request.num_tokens + 1).tolist()
        first_token += num_nodes
    return sampling.sampled_rows(
        np.array(rows, dtype=np.int64),
        np.array(owners, dtype=np.int64),
        np.array(positions, dtype=np.int64),
        np.array(targets, dtype=np.int64),
        scored_tokens(scored_nodes(work, trees), first_rows) if has_targets else None,
    )


_MASK_64 = 2**64 - 1
_REDRAWN = 0x9FB21C651E98DF25  # odd, with bits set evenly


def _sampling_seed(request: Request) -> int:
    """The seed of the request's next sampled token."""
    return (request.seed + request.num_redrawn * _REDRAWN) & _MASK_64


class SamplingTable:
    """Parameters of at most ``max_running`` requests.

    Parameters that are gathered together are stored together: the time depends on the number of numpy calls.
    """

    def __init__(self, max_running: int) -> None:
        self._floats: FloatArray = np.zeros((3, max_running), dtype=np.float32)
        self._temperatures, self._top_ps, self._min_ps = self._floats
        self._ints: IntArray = np.zeros((3, max_running), dtype=np.int64)
        self._top_ks, _, self._top_counts = self._ints
        self._seeds: NDArray[np.uint64] = self._ints[1].view(np.uint64)
        self._no_targets: IntArray = np.full(max_running, -1, dtype=np.int64)
        self.indices: IntArray = np.arange(max_running)
        """0, 1, 2, …: the sampled rows of a batch in which each request has one token. Read only."""
        self.version = 0
        """A number that changes when a request starts or stops running, or when its output is replaced."""
        self._special: dict[int, _Special] = {}
        self._constrained: dict[int, Request] = {}
        self._with_logprobs: set[int] = set()
        self._with_top: set[int] = set()  # that want the likeliest tokens
        self.adapted: set[int] = set()
        """The rows of requests that use an adapter."""
        self.with_media: set[int] = set()
        """The rows of requests that have media."""

    @property
    def has_special_rows(self) -> bool:
        """Whether the logits of a running request are edited, which depends on its latest token."""
        return bool(self._special)

    def attach(self, request: Request) -> None:
        """The request starts to run, in its row of ``req_to_token``."""
        self.version += 1
        row, params = request.req_row, request.params
        if params.has_penalties or params.logit_bias or params.min_tokens:
            self._special[row] = _Special(request)
        if params.top_logprobs:
            self._with_top.add(row)
        if request.next_mask is not None:
            self._constrained[row] = request
        if params.wants_logprobs:
            self._with_logprobs.add(row)
        if request.adapter:
            self.adapted.add(row)
        if request.media.runs:
            self.with_media.add(row)
        self._temperatures[row] = params.temperature
        self._top_ps[row] = params.top_p
        self._top_ks[row] = params.top_k
        self._top_counts[row] = params.top_logprobs
        self._min_ps[row] = params.min_p
        self._seeds[row] = _sampling_seed(request)

    def detach(self, request: Request) -> None:
        """The request no longer runs, and is about to lose its row. ``attach`` may have failed."""
        self.version += 1
        self._special.pop(request.req_row, None)
        self._constrained.pop(request.req_row, None)
        self._with_logprobs.discard(request.req_row)
        self._with_top.discard(request.req_row)
        self.adapted.discard(request.req_row)
        self.with_media.discard(request.req_row)

    def keep_output(self, request: Request, num_kept: int) -> None:
        """Only the first ``num_kept`` generated tokens of the request are unchanged."""
        self.version += 1
        self._seeds[request.req_row] = _sampling_seed(request)
        special = self._special.get(request.req_row)
        if special is not None:
            special.keep_output(num_kept)

    def sampled_rows(
        self,
        rows: IntArray,
        req_rows: IntArray,
        positions: IntArray,
        target_ids: IntArray | None = None,
        scored: ScoredTokens | None = None,
    ) -> SampledRows:
        """Gathers the sampled rows of a batch. Log-probabilities are computed for all rows or none.

        Args:
            rows: [S] the scheduled tokens that they follow.
            req_rows: [S] the rows of their requests in ``req_to_token``.
            positions: [S] the positions that the chosen tokens will have.
            target_ids: [S] as in ``SampledRows``; None if no row has a target.
            scored: Further tokens to score.
        """
        floats: FloatArray = self._floats.take(req_rows, axis=1)
        ints: IntArray = self._ints.take(req_rows, axis=1)
        edits, masks = None, None
        if self._special:
            edits = self._gather_edits(req_rows, target_ids)
        if self._constrained:
            masks = self._gather_masks(req_rows, target_ids)
        return SampledRows(
            rows=rows,
            target_ids=self._no_targets[: len(rows)] if target_ids is None else target_ids,
            temperatures=floats[0],
            top_ps=floats[1],
            top_ks=ints[0],
            min_ps=floats[2],
            seeds=self._seeds.take(req_rows),
            positions=positions,
            needs_logprobs=bool(self._with_logprobs)
            or (target_ids is not None and bool((target_ids >= 0).any())),
            edits=edits,
            masks=masks,
            top_counts=ints[2] if self._with_top and ints[2].any() else None,
            scored=scored,
        )

    def _gather_masks(self, req_rows: IntArray, target_ids: IntArray | None) -> TokenMasks | None:
        """The masks of rows sampled under a grammar. They are computed later (see ``TokenMasks``)."""
        rows: list[int] = []
        masks: list[Callable[[], TokenWords]] = []
        for index, req_row in enumerate(req_rows.tolist()):
            request = self._constrained.get(req_row)
            if request is not None and (target_ids is None or target_ids[index] < 0):
                assert request.next_mask is not None
                rows.append(index)
                masks.append(request.next_mask)
        return TokenMasks(np.array(rows, dtype=np.int64), partial(_computed, masks)) if rows else None

    def _gather_edits(self, req_rows: IntArray, target_ids: IntArray | None) -> LogitEdits | None:
        """The logit edits of sampled rows."""
        found = [
            (index, self._special[req_row])
            for index, req_row in enumerate(req_rows.tolist())
            if req_row in self._special and (target_ids is None or target_ids[index] < 0)
        ]
        return _edits(found) if found else None


def _computed(masks: Sequence[Callable[[], TokenWords]]) -> MaskWords:
    return np.stack([mask() for mask in masks])


@dataclass(frozen=True, slots=True)
class BuiltDecode:
    """A batch that may be the next one, with any token ids and slots."""

    rows: list[Row]
    batch: Batch
    version: int  # of the sampling parameters when it was built


class NextDecode:
    """The batch that may be the next one, of one scheduler.

    Args:
        memory: Has the slots.
        sampling: The parameters of the running requests.
    """

    def __init__(self, memory: KVMemory, sampling: SamplingTable) -> None:
        self._memory = memory
        self._sampling = sampling
        self._built: BuiltDecode | None = None

    def build(self, running: Sequence[Row], num_running: int) -> Batch | None:
        """Builds the batch after the one in flight, if all running requests decode in both. Takes no slots.

        Args:
            running: The rows of the batch in flight.
            num_running: The number of running requests.

        Returns:
            The batch, whose token ids and slots ``fill`` sets; None if another batch must follow.
        """
        self._built = None
        memory, sampling = self._memory, self._sampling
        if len(running) != num_running or sampling.has_special_rows:
            return None
        rows: list[Row] = []
        for row in running:
            request = row.request
            if row.withdrawn_slots is not None:  # it left, and another running request is not in the batch
                return None
            if row.targets is not SAMPLED_ONCE or request.num_generated + 1 >= request.max_new_tokens:
                return None
            rows.append(Row(request, row.end, 1, SAMPLED_ONCE))
        shared = memory.readers.prefixes() if num_running > 1 else ()
        batch = build_batch(rows, np.zeros(num_running, dtype=np.int32), memory.table, shared, sampling)
        self._built = BuiltDecode(rows, batch, sampling.version)
        return batch

    def find(self, num_running: int) -> BuiltDecode | None:
        """Returns the batch that ``build`` made, if the running requests would have the same one now. Forgets
        it in any case."""
        built, self._built = self._built, None
        if built is None or len(built.rows) != num_running or self._sampling.version != built.version:
            return None
        # Shared prefixes change only when a request starts or ends, or with a write to the table.
        memory, changes = self._memory, built.batch.changes
        if memory.num_available < num_running or changes is None or not memory.table.ends_with(changes):
            return None
        return built if all(row.request.num_tokens == row.end for row in built.rows) else None

    def fill(self, built: BuiltDecode, slots: SlotArray) -> None:
        """Sets the token ids of a batch that was found, and the slots of their KV."""
        batch = built.batch
        assert batch.changes is not None
        batch.token_ids[:] = [row.request.tokens[row.start] for row in built.rows]
        batch.write_slots[:] = slots
        self._memory.table.replace_slots(batch.changes, slots)


class _Special:
    """The data of a special request that the table does not hold."""

    __slots__ = ("_counts", "_forbidden_ids", "_request", "bias_ids", "biases", "params")

    def __init__(self, request: Request) -> None:
        params = request.params
        self.params = params
        self.bias_ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self.biases = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self._request = request
        self._forbidden_ids = np.array(request.end_ids, dtype=np.int64)
        self._counts: TokenCounts | None = None
        if params.has_penalties:
            self._counts = TokenCounts(request, with_prompt=params.repetition_penalty != 1)

    def counts(self) -> tuple[IntArray, FloatArray]:
        """The penalized tokens, and how often each was generated."""
        if self._counts is None:
            return _NO_IDS, _NO_NUMBERS
        return self._counts.now()

    def keep_output(self, num_kept: int) -> None:
        if self._counts is not None:
            self._counts.truncate(num_kept)

    def forbidden_ids(self) -> IntArray:
        """Tokens that are forbidden now."""
        request = self._request
        return self._forbidden_ids if request.num_generated < self.params.min_tokens else _NO_IDS


_NO_IDS: IntArray = np.zeros(0, dtype=np.int64)
_NO_NUMBERS: FloatArray = np.zeros(0, dtype=np.float32)


def _edits(found: list[tuple[int, _Special]]) -> LogitEdits | None:
    """All edits of these rows, or None."""
    counted = [special.counts() for _, special in found]
    forbidden = [special.forbidden_ids() for _, special in found]
    num_penalized = [len(ids) for ids, _ in counted]
    num_biased = [len(special.bias_ids) for _, special in found]
    num_forbidden = [len(ids) for ids in forbidden]
    if not any(num_penalized) and not any(num_biased) and not any(num_forbidden):
        return None
    rows = np.array([index for index, _ in found], dtype=np.int64)
    params = [special.params for _, special in found]
    repetitions = np.array([p.repetition_penalty for p in params], dtype=np.float32)
    frequencies = np.array([p.frequency_penalty for p in params], dtype=np.float32)
    presences = np.array([p.presence_penalty for p in params], dtype=np.float32)
    return LogitEdits(
        penalized_rows=np.repeat(rows, num_penalized),
        penalized_ids=np.concatenate([ids for ids, _ in counted]),
        penalized_counts=np.concatenate([counts for _, counts in counted]),
        repetitions=np.repeat(repetitions, num_penalized),
        frequencies=np.repeat(frequencies, num_penalized),
        presences=np.repeat(presences, num_penalized),
        biased_rows=np.repeat(rows, num_biased),
        biased_ids=np.concatenate([special.bias_ids for _, special in found]),
        biases=np.concatenate([special.biases for _, special in found]),
        forbidden_rows=np.repeat(rows, num_forbidden),
        forbidden_ids=np.concatenate(forbidden),
    )


class TokenCounts:
    """The distinct tokens of one request and how often each was generated, for penalties. ``with_prompt``:
    tokens that occur only in the prompt are included, with count 0.

    The counts follow from the request's tokens, so nothing is stored when it is preempted. A step costs time
    proportional to its new tokens. Code that replaces generated tokens must call ``truncate``.
    """

    def __init__(self, request: Request, *, with_prompt: bool) -> None:
        prompt = request.tokens[: request.num_prompt]
        known = np.unique(prompt[prompt >= 0]) if with_prompt else prompt[:0]
        self._request = request
        self._counted: list[int] = []  # the generated tokens counted so far, in order
        self._num_fixed = self._num_ids = len(known)
        room = len(known) + max(16, request.num_generated + 1)
        self._ids: IntArray = np.zeros(room, dtype=np.int64)
        self._counts: FloatArray = np.zeros(room, dtype=np.float32)
        self._ids[: len(known)] = known
        self._index_of: dict[int, int] = {token: index for index, token in enumerate(known.tolist())}

    def now(self) -> tuple[IntArray, FloatArray]:
        """Token ids and counts, up to date. The arrays are valid until the next call."""
        request = self._request
        first_new = request.num_prompt + len(self._counted)
        for token in request.tokens[first_new : request.num_tokens].tolist():
            index = self._index_of.get(token)
            if index is None:
                index = self._add(token)
            self._counts[index] += 1
            self._counted.append(token)
        return self._ids[: self._num_ids], self._counts[: self._num_ids]

    def truncate(self, num_generated: int) -> None:
        """Only the first ``num_generated`` generated tokens are unchanged."""
        for token in self._counted[num_generated:]:
            index = self._index_of[token]
            self._counts[index] -= 1
            if self._counts[index] == 0 and index >= self._num_fixed:
                self._remove(token, index)
        del self._counted[num_generated:]

    def _add(self, token: int) -> int:
        index = self._num_ids
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[index] = token
        self._counts[index] = 0
        self._index_of[token] = index
        self._num_ids = index + 1
        return index

    def _remove(self, token: int, index: int) -> None:
        """Moves the last token to its index."""
        self._num_ids -= 1
        last = int(self._ids[self._num_ids])
        self._ids[index], self._counts[index] = last, self._counts[self._num_ids]
        self._index_of[last] = index
        del self._index_of[token]
