"""Parts of a prompt that are not text: each is a run of pseudo-tokens under the identity of its content.

The radix cache, the scheduler and the slot tables see token ids only. Pseudo-tokens are below 0, so they are
never ids of text, and they are hashed from the identity: two media share cached KV only if they are the same.
If a run is too short for enough bits, the ids of text before it have the rest (``lead_tokens``).

Rotary positions may have several axes (an image's rows and columns, a video's frames), and need not grow by
one per token. The positions that select slots and random numbers do.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.cache.token_run import INNER_IDS, TokenArray

Positions = NDArray[np.int64]

IDENTITY_BITS = 128
"""At least this many bits of a medium's hash precede its keys and values in the cache, so that it is
infeasible to find two media that share them."""
ID_BITS = 30
"""The bits of the hash in a pseudo-token."""
INNER_ID_BITS = 29
"""The bits of the hash in one of ``INNER_IDS``."""
LEAD_BITS = 9
"""The bits of the hash in the id of a text token before a short run. The lower bits of the id are the
token."""
_TOKEN_BITS = 20
_LEADS = -(2**29)


class SubmittedRun(NamedTuple):
    """A part of the prompt that is not text, as ``MediaRun``. ``positions``: int64, one axis after the
    other."""

    identity: str
    start: int
    num_axes: int
    positions: bytes
    first: int = 0
    sees_all: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class MediaRun:
    """A medium in a prompt.

    - ``identity``: a digest of its content and of how it is encoded.
    - ``start``: index of its first token.
    - ``positions`` [A, n]: the rotary positions of its ``n`` tokens on ``A`` axes, relative to the first
      position after the text before it.
    - ``first``: the row of its first token in the medium's features. A medium that is cut into tiles, with
      markup between them, is a run for each tile.
    - ``sees_all``: its tokens attend to all tokens of the run, also later ones, so no prefix may end in it.
    """

    identity: str
    start: int
    positions: Positions
    first: int = 0
    sees_all: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.positions[0])

    @property
    def end(self) -> int:
        """Index of the first token after it."""
        return self.start + self.num_tokens

    @classmethod
    def of(cls, submitted: SubmittedRun) -> MediaRun:
        """The run of a ``Submit``."""
        positions = np.frombuffer(submitted.positions, dtype=np.int64).reshape(submitted.num_axes, -1)
        return cls(submitted.identity, submitted.start, positions, submitted.first, submitted.sees_all)

    def submitted(self) -> SubmittedRun:
        """The run for a ``Submit``."""
        positions = np.ascontiguousarray(self.positions, dtype=np.int64)
        return SubmittedRun(
            self.identity, self.start, len(positions), positions.tobytes(), self.first, self.sees_all
        )


@dataclass(frozen=True, slots=True, eq=False)
class MediaPiece:
    """A run of a medium without its place in a prompt. The fields are as in ``MediaRun``."""

    positions: Positions
    first: int = 0
    sees_all: bool = False

    def at(self, identity: str, start: int) -> MediaRun:
        """The run in a prompt, from token ``start`` on."""
        return MediaRun(identity, start, self.positions, self.first, self.sees_all)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PreparedMedium:
    """A medium as a model reads it.

    - ``identity``: the sha256 of ``arrays`` with their names, shapes and types, of ``pieces``, and of all
      settings on which the features depend, in hexadecimal digits.
    - ``arrays``: the input of the model's vision tower, such as ``pixels`` [tiles, 3, height, width]. Bytes
      stay bytes: the tower scales and normalises them.
    - ``pieces``: the replacement of the medium's placeholder in a prompt, in order: markup, which may have
      special tokens, and runs of the medium's tokens.
    """

    identity: str
    arrays: Mapping[str, NDArray[Any]]
    pieces: tuple[str | MediaPiece, ...]

    @property
    def nbytes(self) -> int:
        return sum([array.nbytes for array in self.arrays.values()])


def pseudo_tokens(run: MediaRun) -> NDArray[np.int32]:
    """The token ids that stand for the run, all below 0. They depend on its positions, as its keys and values
    do. In a run with ``sees_all``, all but the last one are ``INNER_IDS``."""
    bits = np.frombuffer(_hashed(run, 4 * run.num_tokens), dtype=np.int32)
    ids = (bits & np.int32(2**ID_BITS - 1)) | np.int32(-(2**31))
    if run.sees_all:
        ids[:-1] = (ids[:-1] & np.int32(2**INNER_ID_BITS - 1)) | np.int32(INNER_IDS.start)
    return ids


def lead_tokens(tokens: NDArray[np.int32], media: Sequence[MediaRun]) -> dict[int, int]:
    """The ids that replace text before a run in the cache, by index, if the pseudo-tokens of its medium up to
    the end of the run have fewer than ``IDENTITY_BITS``. Such an id encodes the token and bits of the run
    that follows, so this text is shared only between prompts with the same medium after it. The model reads
    the text. There are fewer ids if another run is close before it.

    Args:
        tokens: The prompt.
        media: Its runs, in order.
    """
    leads: dict[int, int] = {}
    num_bits: Counter[str] = Counter()  # of each medium
    done = 0
    for run in media:
        num_inner = run.num_tokens - 1 if run.sees_all else 0
        num_bits[run.identity] += ID_BITS * (run.num_tokens - num_inner) + INNER_ID_BITS * num_inner
        missing = IDENTITY_BITS - num_bits[run.identity]
        num_leads = min(-(-missing // LEAD_BITS), run.start - done)
        if num_leads > 0:
            num_bits[run.identity] += LEAD_BITS * num_leads
            hashed = _hashed(run, 4 * run.num_tokens + 2 * num_leads)[4 * run.num_tokens :]
            bits = np.frombuffer(hashed, dtype=np.uint16) & (2**LEAD_BITS - 1)
            start = run.start - num_leads
            for index, token, own in zip(
                range(start, run.start), tokens[start : run.start].tolist(), bits.tolist(), strict=True
            ):
                if 0 <= token < 2**_TOKEN_BITS:
                    leads[index] = _LEADS + (own << _TOKEN_BITS) + token
        done = run.end
    return leads


def with_leads(tokens: TokenArray, leads: Mapping[int, int]) -> TokenArray:
    """Returns a copy of the tokens with the ids of ``lead_tokens`` in their places, as the cache has them."""
    tokens = tokens.copy()
    for index, token_id in leads.items():
        if index < len(tokens):
            tokens[index] = token_id
    return tokens


def _hashed(run: MediaRun, count: int) -> bytes:
    """The first ``count`` bytes of the run's hash."""
    positions = np.ascontiguousarray(run.positions, dtype=np.int64)
    content = f"{run.identity}\0{run.first}\0{run.sees_all}\0".encode() + positions.tobytes()
    return hashlib.shake_256(content).digest(count)


def rope_positions(num_prompt: int, media: Sequence[MediaRun]) -> Positions:
    """The rotary positions of a prompt with ``media``, which are in order.

    Text counts one position for each token on all axes, and continues after the largest position of a medium
    on any axis (Wang et al., "Qwen2-VL", 2024, section 2.1), as in the authors' code. transformers 5 differs
    for Qwen2-VL and Qwen2.5-VL: after a clip with more times than rows and columns, text repeats positions of
    the clip, until the first generated token continues after all of it.

    Returns:
        [A, num_prompt + 1]: the last column is the position of the first generated token.
    """
    num_axes = max(run.positions.shape[0] for run in media)
    found: Positions = np.empty((num_axes, num_prompt + 1), dtype=np.int64)
    done = position = 0
    for run in media:
        num_text = run.start - done
        found[:, done : run.start] = np.arange(position, position + num_text)
        position += num_text
        found[:, run.start : run.end] = position + run.positions
        position += int(run.positions.max()) + 1
        done = run.end
    found[:, done:] = np.arange(position, position + num_prompt + 1 - done)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """The media of a prompt.

    - ``runs``: in order.
    - ``leads``: the ids that replace text before a run in the cache, by index (``lead_tokens``).
    - ``rope``: as ``rope_positions`` returns them.
    """

    runs: Sequence[MediaRun]
    leads: Mapping[int, int]
    rope: Positions

    @classmethod
    def of(cls, tokens: TokenArray, runs: Sequence[MediaRun]) -> PromptMedia:
        """The media of a prompt with these tokens. There is at least one run."""
        return cls(runs, lead_tokens(tokens, runs), rope_positions(len(tokens), runs))

    def rope_between(self, start: int, end: int) -> Positions:
        """The rotary positions [A, end - start] of the prompt and the output."""
        last = self.rope.shape[1] - 1
        if end <= last:
            return self.rope[:, start:end]
        after = self.rope[:, last:] + np.arange(max(0, start - last), end - last)
        return after if start >= last else np.concatenate((self.rope[:, start:last], after), axis=1)

    def whole_end(self, start: int, end: int) -> int:
        """An index near ``end`` that no run which attends both ways contains: the start of the run that
        contains it, or the run's end, if that would not be after ``start``."""
        for run in self.runs:
            if run.sees_all and run.start < end < run.end:
                return run.start if run.start > start else run.end
        return end


NO_MEDIA = PromptMedia((), {}, np.zeros((1, 1), dtype=np.int64))
