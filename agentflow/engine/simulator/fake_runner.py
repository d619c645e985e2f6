"""A deterministic replacement for a model, to test everything above the runner without torch.

Its "KV" is the token id and positions written to each slot. The next token is a hash of all tokens that
``req_to_token`` shows, so a wrong slot or order, or a slot that another request overwrote, changes the
output. A slot with the wrong position raises immediately.

An image has no features before its encoding; then the features of its rows are part of its tokens.

It has no logits. Penalties and biases raise ``NotImplementedError``; forbidden and masked tokens are never
chosen. The likeliest tokens that it reports are the chosen one and its successors by id.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.batch import Batch, BatchOutput, LogitEdits, SampledRows, TokenMasks
from agentflow.engine.grammar.grammar import TokenWords, is_allowed
from agentflow.engine.media_run import PreparedMedium
from agentflow.engine.runner import AdapterInfo, ReadAdapter, RunnerInfo
from agentflow.engine.store.adapter_folder import adapter_identity
from agentflow.kernels.sampling.no_choice import NO_TOKEN
from agentflow.runtime.word_embedding import word_embedding

SLICE_BYTES = 1000
BYTES_PER_FEATURE = 8

NextToken = Callable[[NDArray[np.int64]], int | None]


class FakeRunner:
    """A model without arithmetic: the next token is a hash of the tokens before it.

    Args:
        num_slots, max_context, end_token_ids, launches_ahead, reads_media: As in ``RunnerInfo``.
        vocab_size: The number of tokens among which the hash chooses.
        embedding_size: If not 0, the runner makes embeddings with this number of dimensions
            (``word_embedding`` of the ids) and generates nothing.
        next_token: May choose the next token; the hash chooses if it returns None.
        on_step: Called with every batch before it runs, in the engine's thread: tests block a step there, or
            raise.
        needs_features: Images must be encoded.
        on_slices: Called before slices of an encoding run, with the identity and their number.
    """

    def __init__(
        self,
        *,
        num_slots: int = 4096,
        vocab_size: int = 1000,
        max_context: int = 2048,
        end_token_ids: tuple[int, ...] = (),
        embedding_size: int = 0,
        next_token: NextToken | None = None,
        on_step: Callable[[Batch], None] | None = None,
        launches_ahead: bool = False,
        reads_media: bool = True,
        needs_features: bool = True,
        on_slices: Callable[[str, int], None] | None = None,
    ) -> None:
        self.info = RunnerInfo(
            model="fake",
            vocab_size=vocab_size,
            max_context=max_context,
            num_slots=num_slots,
            end_token_ids=end_token_ids,
            kv_bytes_per_token=16,
            weight_bytes=0,
            embedding_size=embedding_size,
            weights="no weights",
            identity="fake",
            launches_ahead=launches_ahead,
            prepares=not launches_ahead,
            reads_media=reads_media,
            kernels="fake",
        )
        self._next_token = next_token
        self._on_step = on_step
        self._slot_tokens = np.full(num_slots, -1, dtype=np.int64)
        self._slot_positions = np.full(num_slots, -1, dtype=np.int64)
        self._slot_adapters = np.zeros(num_slots, dtype=np.int64)
        self._slot_ropes = np.full(num_slots, -1, dtype=np.int64)
        self.adapters: set[str] = set()
        self._needs_features = needs_features
        self._on_slices = on_slices
        self.encodings: dict[str, FakeEncoding] = {}
        """By the identity of the image. An encoding without slices left stands for features."""
        self.num_encoded = 0
        self._launched: deque[Batch] = deque()
        self._last_output: BatchOutput | None = None

    def prepare(self, batch: Batch) -> None:
        assert self._launched
        assert batch.pending is None

    def launch(self, batch: Batch) -> Batch:
        assert self.info.launches_ahead or not self._launched
        assert batch.pending is None or self._launched
        if not self.info.launches_ahead:  # it is collected before the scheduler changes its tables
            self._launched.append(batch)
            return batch
        launched = replace(batch, req_to_token=batch.req_to_token.copy(), token_ids=batch.token_ids.copy())
        self._launched.append(launched)
        batch.sampled.fill_masks()
        return launched

    def collect(self, handle: Batch) -> BatchOutput:
        launched = self._launched.popleft()
        assert launched is handle
        if self._on_step is not None:
            self._on_step(handle)
        if handle.pending is not None:
            assert self._last_output is not None
            handle.token_ids[handle.pending.inputs] = self._last_output.token_ids[handle.pending.outputs]
        self._last_output = self._run(handle)
        return self._last_output

    def _run(self, batch: Batch) -> BatchOutput:
        self._slot_tokens[batch.write_slots] = self._with_features(batch)
        self._slot_positions[batch.write_slots] = batch.positions
        adapters = self._token_adapters(batch)
        self._slot_adapters[batch.write_slots] = adapters
        self._slot_ropes[batch.write_slots] = _rope_numbers(batch)
        slots_of_rows = _SlotsOfRows(batch)
        seen = [
            self._tokens_in(slots_of_rows.seen_by(row, int(batch.positions[row]) + 1), int(adapters[row]))
            for row in batch.sampled.rows.tolist()
        ]
        if size := self.info.embedding_size:
            made = [word_embedding((b"%d" % token for token in tokens.tolist()), size) for tokens in seen]
            embeddings = np.array(made, dtype=np.float32).reshape(len(seen), size)
            return BatchOutput(batch.sampled.target_ids.copy(), None, embeddings=embeddings)
        return self.choose(seen, batch.sampled)

    def read_adapter(self, folder: Path) -> ReadAdapter:
        """An adapter is its folder's files; it changes every token that the hash chooses."""
        return ReadAdapter(adapter_identity(folder), None)

    def install_adapter(self, adapter: ReadAdapter) -> AdapterInfo:
        self.adapters.add(adapter.identity)
        return AdapterInfo(adapter.identity, nbytes=1000)

    def drop_adapter(self, identity: str) -> None:
        self.adapters.remove(identity)

    def encode_medium(self, medium: PreparedMedium) -> FakeEncoding:
        assert medium.identity not in self.encodings
        encoding = self.encodings[medium.identity] = FakeEncoding(medium, self._on_slices)
        self.num_encoded += 1
        return encoding

    def feature_bytes(self, medium: PreparedMedium) -> int:
        return BYTES_PER_FEATURE * num_feature_rows(medium)

    def drop_medium(self, identity: str) -> None:
        del self.encodings[identity]

    def _with_features(self, batch: Batch) -> NDArray[np.int64]:
        """The tokens, with features added to the tokens of images. If these attend to their whole run, the
        run must be in the batch."""
        media = batch.media
        if media is None or not self._needs_features:
            return batch.token_ids
        tokens = batch.token_ids.copy()
        for number, identity in enumerate(media.identities):
            encoding = self.encodings[identity]
            assert not encoding.num_slices, "a batch has an image without features"
            [indices] = np.nonzero(media.of_tokens == number)
            feature_rows = media.feature_rows[indices]
            encoding.check_whole(feature_rows)
            tokens[indices] += encoding.features[feature_rows]
        return tokens

    def _token_adapters(self, batch: Batch) -> NDArray[np.int64]:
        """A number for each token's adapter, 0 for none."""
        if batch.adapters is None:
            return np.zeros(len(batch.token_ids), dtype=np.int64)
        assert self.adapters.issuperset(batch.adapters.identities)
        numbers = [zlib.crc32(identity.encode()) for identity in batch.adapters.identities]
        return np.array([*numbers, 0], dtype=np.int64)[batch.adapters.of_tokens]

    def choose(self, seen: list[NDArray[np.int64]], sampled: SampledRows) -> BatchOutput:
        """A token for each sampled row. ``seen``: all tokens before each. Tests override this with other
        models."""
        forbidden = _forbidden(sampled.edits, len(seen))
        masks = masks_by_row(sampled.masks)
        tokens, logprobs = [], []
        for i, before in enumerate(seen):
            token = int(sampled.target_ids[i])
            if token < 0:
                token = self._choose(before, float(sampled.temperatures[i]), int(sampled.seeds[i]))
                token = self._next_allowed(token, forbidden[i], masks.get(i))
            tokens.append(token)
            logprobs.append(_logprob(before, token))
        scored: list[float] = []
        if sampled.scored is not None:
            pairs = zip(sampled.scored.rows.tolist(), sampled.scored.token_ids.tolist(), strict=True)
            scored = [_logprob(seen[row], token) for row, token in pairs]
        output = BatchOutput(
            token_ids=np.array(tokens, dtype=np.int64),
            logprobs=np.array(logprobs, dtype=np.float32) if sampled.needs_logprobs else None,
            # Like a model, which computes nothing if nothing is scored.
            scored_logprobs=np.array(scored, dtype=np.float32) if scored else None,
            ranks=np.ones(len(tokens), dtype=np.int64),
        )
        return output if sampled.top_counts is None else self._with_top(output, int(sampled.top_counts.max()))

    def close(self) -> None:
        """Frees nothing."""

    def _tokens_in(self, slots: NDArray[np.int64], adapter: int) -> NDArray[np.int64]:
        if not np.array_equal(self._slot_positions[slots], np.arange(len(slots))):
            raise RuntimeError("req_to_token shows a slot that has another position")
        if (self._slot_adapters[slots] != adapter).any():
            raise RuntimeError("req_to_token shows a slot of another adapter")
        tokens, ropes = self._slot_tokens[slots], self._slot_ropes[slots]
        if (ropes != np.arange(len(slots))).any():
            tokens = np.append(tokens, ropes)
        return np.append(adapter, tokens) if adapter else tokens

    def _choose(self, seen: NDArray[np.int64], temperature: float, seed: int) -> int:
        chosen = self._next_token(seen) if self._next_token is not None else None
        if chosen is not None:
            return chosen
        salt = b"%d" % seed if temperature > 0 else b""
        return zlib.crc32(seen.tobytes() + salt) % self.info.vocab_size

    def _next_allowed(self, token: int, forbidden: set[int], mask: TokenWords | None) -> int:
        """The token, or the next one by id that may follow."""
        if token not in forbidden and (mask is None or is_allowed(mask, token)):
            return token
        size = self.info.vocab_size
        if mask is None:
            allowed = np.ones(size, dtype=np.uint8)
        else:
            allowed = np.unpackbits(mask.view(np.uint8), count=size, bitorder="little")
        allowed[[*forbidden]] = 0
        [following] = np.nonzero(np.roll(allowed, -token))
        return (token + int(following[0])) % size if len(following) else NO_TOKEN

    def _with_top(self, output: BatchOutput, count: int) -> BatchOutput:
        assert output.logprobs is not None
        rank = np.arange(count)
        ids = (output.token_ids[:, None] + rank) % self.info.vocab_size
        logprobs = output.logprobs[:, None] - rank.astype(np.float32)
        return replace(output, top_ids=ids, top_logprobs=logprobs)


class FakeEncoding:
    """An encoding of one slice for each ``SLICE_BYTES`` of the image. The features of a row are a number."""

    flops_per_slice = 1e6

    def __init__(self, medium: PreparedMedium, on_slices: Callable[[str, int], None] | None = None) -> None:
        self._medium = medium
        self._on_slices = on_slices
        self.num_slices = 1 + medium.nbytes // SLICE_BYTES

    def run(self, count: int) -> None:
        assert 0 < count <= self.num_slices
        if self._on_slices is not None:
            self._on_slices(self._medium.identity, count)
        self.num_slices -= count

    @property
    def features(self) -> NDArray[np.int64]:
        """A number for each row, above all token ids."""
        pixels = b"".join([name.encode() + array.tobytes() for name, array in self._medium.arrays.items()])
        rows = range(num_feature_rows(self._medium))
        return np.array([2**32 + zlib.crc32(pixels + b"%d" % row) for row in rows], dtype=np.int64)

    def check_whole(self, feature_rows: NDArray[np.int64]) -> None:
        """Checks that runs that attend both ways are whole."""
        for piece in self._medium.pieces:
            if not isinstance(piece, str) and piece.sees_all:
                rows = range(piece.first, piece.first + piece.positions.shape[1])
                counts = {np.count_nonzero(feature_rows == row) for row in rows}
                assert len(counts) == 1, "a run that attends both ways is divided"


def num_feature_rows(medium: PreparedMedium) -> int:
    """The rows of the features."""
    runs = [piece for piece in medium.pieces if not isinstance(piece, str)]
    return max([piece.first + len(piece.positions[0]) for piece in runs])


def _rope_numbers(batch: Batch) -> NDArray[np.int64]:
    """A number for each token's rotary positions: the position if it is the same on all axes."""
    if batch.media is None:
        assert (batch.token_ids >= 0).all()
        return batch.positions
    media = batch.media
    assert ((media.of_tokens >= 0) == (batch.token_ids < 0)).all()
    axes = media.rope_positions
    mixed = np.array([zlib.crc32(column.tobytes()) for column in axes.T.astype(np.int64)], dtype=np.int64)
    return np.where((axes == axes[0]).all(axis=0), axes[0], mixed)


class _SlotsOfRows:
    """Which slots each scheduled token attends to."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._owners = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
        if batch.trees is not None:
            lens = batch.trees.query_lens
            self._tree_of = np.repeat(np.arange(len(lens)), lens)

    def seen_by(self, row: int, end: int) -> NDArray[np.int64]:
        """The slots of all positions below ``end``, in order."""
        batch, trees = self._batch, self._batch.trees
        if row < len(self._owners):
            return batch.req_to_token[batch.req_rows[self._owners[row]], :end].astype(np.int64)
        assert trees is not None
        node = row - len(self._owners)
        tree = self._tree_of[node]
        prefix = batch.req_to_token[trees.req_rows[tree], : trees.prefix_lens[tree]]
        return np.concatenate((prefix, trees.paths[node, : trees.path_lens[node]]), dtype=np.int64)


def _logprob(before: NDArray[np.int64], token: int) -> float:
    return -(zlib.crc32(before.tobytes() + b"%d" % token) % 5000) / 1000


def masks_by_row(masks: TokenMasks | None) -> dict[int, TokenWords]:
    """The mask of each sampled row that has one."""
    return {} if masks is None else dict(zip(masks.rows.tolist(), masks.words, strict=True))


def _forbidden(edits: LogitEdits | None, num_rows: int) -> list[set[int]]:
    """The forbidden tokens of each row."""
    found: list[set[int]] = [set() for _ in range(num_rows)]
    if edits is None:
        return found
    if len(edits.penalized_rows) or len(edits.biased_rows):
        raise NotImplementedError("the fake model has no logits for penalties and logit_bias")
    for row, token in zip(edits.forbidden_rows.tolist(), edits.forbidden_ids.tolist(), strict=True):
        found[row].add(token)
    return found
