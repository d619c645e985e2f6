"""Drives a model runner by hand: sequences with slots at random places, steps made of any work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.batch import Batch, BatchAdapters, BatchMedia, BatchOutput, SampledRows
from agentflow.engine.media_run import MediaRun, rope_positions
from agentflow.engine.runner import ModelRunner, run_batch

FOREIGN = 2**31 - 1
"""The value of req_to_token where no token is: no slot has this number."""


@dataclass
class Walker:
    """One request: its row in the page table, its tokens, and how many of them are computed."""

    req_row: int
    tokens: list[int]
    num_computed: int = 0
    adapter: str = ""
    media: Sequence[MediaRun] = ()
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Driver:
    """Owns the page table of a runner. ``seed``: of the slots' places and of chunk sizes."""

    def __init__(self, runner: ModelRunner, *, seed: int = 0, max_requests: int = 64) -> None:
        self.runner = runner
        self.rng = np.random.default_rng(seed)
        self._free = self.rng.permutation(runner.info.num_slots).tolist()
        columns = min(runner.info.max_context, 4096)
        self._table = np.full((max_requests, columns), FOREIGN, dtype=np.int32)
        self._page_rows = self.rng.permutation(max_requests).tolist()

    def add(self, tokens: Sequence[int], prefix_of: Walker | None = None, shared: int = 0) -> Walker:
        """A new sequence; its first ``shared`` tokens use the slots of another, computed one."""
        sequence = Walker(self._page_rows.pop(), list(tokens))
        if prefix_of is not None:
            assert prefix_of.tokens[:shared] == sequence.tokens[:shared]
            assert shared <= prefix_of.num_computed
            self._table[sequence.req_row, :shared] = self._table[prefix_of.req_row, :shared]
            sequence.num_computed = shared
        return sequence

    def step(self, work: Sequence[tuple[Walker, int]], **sampling: Any) -> BatchOutput:
        """Computes the next tokens of each sequence; sequences at their end get one more token.
        ``sampling``: fields of SampledRows instead of greedy ones at their ends; with ``rows`` among
        them no token is appended."""
        work = sorted(work, key=lambda pair: pair[1] > 1)
        self.allot_slots(work)
        ends = [sequence.num_computed + num_rows for sequence, num_rows in work]
        done = [end == len(sequence.tokens) for (sequence, _), end in zip(work, ends, strict=True)]
        output = run_batch(self.runner, self.batch(work, done, **sampling))
        for (sequence, _), end in zip(work, ends, strict=True):
            sequence.num_computed = end
        if "rows" in sampling:
            return output
        finished = [sequence for (sequence, _), is_done in zip(work, done, strict=True) if is_done]
        for sequence, token in zip(finished, output.token_ids.tolist(), strict=True):
            sequence.tokens.append(token)
        return output

    def score(
        self, work: Sequence[tuple[Walker, int]], targets: Mapping[int, Sequence[int]]
    ) -> Iterator[tuple[Walker, list[float]]]:
        """Computes the given number of next tokens of each sequence, and yields the log-probabilities of its
        targets after them. ``targets``: by the ``id`` of a sequence, the target after each of its tokens."""
        work = sorted(work, key=lambda pair: pair[1] > 1)
        spans = [(w, slice(w.num_computed, w.num_computed + num_rows)) for w, num_rows in work]
        target_ids = np.concatenate([targets[id(w)][span] for w, span in spans])
        rows = np.arange(len(target_ids))
        output = self.step(work, rows=rows, target_ids=target_ids, needs_logprobs=True)
        assert output.logprobs is not None
        ends = np.cumsum([num_rows for _, num_rows in work])[:-1]
        for (sequence, _), part in zip(work, np.split(output.logprobs, ends), strict=True):
            yield sequence, part.tolist()

    def allot_slots(self, work: Sequence[tuple[Walker, int]]) -> None:
        """A slot for each row."""
        for sequence, num_rows in work:
            for position in range(sequence.num_computed, sequence.num_computed + num_rows):
                self._table[sequence.req_row, position] = self._free.pop()

    def generate(self, sequences: Sequence[Walker], num_tokens: int, *, max_chunk: int = 4096) -> None:
        """Greedy tokens for all of them: prefill in chunks of random size, mixed with decoding."""
        while pending := [s for s in sequences if len(s.generated) < num_tokens]:
            work = []
            for sequence in pending:
                left = len(sequence.tokens) - sequence.num_computed
                chunk = left if max_chunk >= 4096 else int(self.rng.integers(1, max_chunk + 1))
                work.append((sequence, min(left, chunk)))
            self.step(work)

    def batch(self, work: Sequence[tuple[Walker, int]], done: Sequence[bool], **sampling: Any) -> Batch:
        """A batch in the scheduler's form, slots included; ``done``: the sequences that get a token."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, num_rows in work:
            span = slice(sequence.num_computed, sequence.num_computed + num_rows)
            tokens += sequence.tokens[span]
            positions += range(span.start, span.stop)
            slots += self._table[sequence.req_row, span].tolist()
        query_lens = np.array([num_rows for _, num_rows in work], dtype=np.int64)
        return Batch(
            token_ids=np.array(tokens, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            write_slots=np.array(slots, dtype=np.int64),
            req_to_token=self._table,
            req_rows=np.array([sequence.req_row for sequence, _ in work], dtype=np.int64),
            query_lens=query_lens,
            kv_lens=np.array([s.num_computed + n for s, n in work], dtype=np.int64),
            num_decode=int((query_lens == 1).sum()),
            adapters=_adapters([sequence.adapter for sequence, _ in work], query_lens),
            media=_media(work),
            sampled=sampled_rows(**({"rows": (np.cumsum(query_lens) - 1)[np.array(done)]} | sampling)),
        )


def _adapters(of_requests: Sequence[str], query_lens: NDArray[np.int64]) -> BatchAdapters | None:
    identities = tuple(dict.fromkeys(one for one in of_requests if one))
    if not identities:
        return None
    places = [identities.index(one) if one else -1 for one in of_requests]
    return BatchAdapters(identities, np.repeat(np.array(places, dtype=np.int64), query_lens))


def _media(work: Sequence[tuple[Walker, int]]) -> BatchMedia | None:
    """Token by token."""
    runs = [run for sequence, _ in work for run in sequence.media]
    if not runs:
        return None
    names = [run.identity for run in runs]
    num_axes = max(len(run.positions) for run in runs)
    rope: list[NDArray[np.int64]] = []
    of_tokens: list[int] = []
    places: list[int] = []
    spans: dict[tuple[int, int], list[int]] = {}
    for number, (sequence, num_rows) in enumerate(work):
        known = np.arange(len(sequence.tokens) + 1)[None].repeat(num_axes, 0)
        if sequence.media:
            known = rope_positions(sequence.prompt_len, sequence.media)
            later = known[:, -1:] + np.arange(1, len(sequence.generated) + 1)
            known = np.concatenate((known, later), axis=1)
            known = known.repeat(num_axes // len(known), 0)
        for position in range(sequence.num_computed, sequence.num_computed + num_rows):
            rope.append(known[:, position])
            run = next((r for r in sequence.media if r.start <= position < r.end), None)
            if run is not None and run.sees_all:
                spans.setdefault((number, run.start), []).append(len(of_tokens))
            of_tokens.append(-1 if run is None else names.index(run.identity))
            places.append(0 if run is None else run.first + position - run.start)
    both_ways = np.array([(span[0], span[-1] + 1) for span in spans.values()]) if spans else None
    return BatchMedia(np.stack(rope, 1), tuple(names), np.array(of_tokens), np.array(places), both_ways)


def sampled_rows(rows: Sequence[int] | NDArray[np.int64], **changed: Any) -> SampledRows:
    """Sampled rows with temperature 0; any array may be given instead."""
    n = len(rows)
    values: dict[str, Any] = {
        "rows": np.asarray(rows, dtype=np.int64),
        "target_ids": np.full(n, -1, dtype=np.int64),
        "temperatures": np.zeros(n, dtype=np.float32),
        "top_ps": np.ones(n, dtype=np.float32),
        "top_ks": np.zeros(n, dtype=np.int64),
        "min_ps": np.zeros(n, dtype=np.float32),
        "seeds": np.zeros(n, dtype=np.uint64),
        "positions": np.zeros(n, dtype=np.int64),
        "needs_logprobs": False,
    }
    return SampledRows(**(values | changed))
