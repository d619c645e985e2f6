"""How a token is chosen: the parameters that travel with each gen, and their checks."""

from __future__ import annotations

import hashlib

import msgspec

from agentflow.errors import BadArgument

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
# Counts and ids are 32-bit in the engine.
MAX_INT = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of one generation.

    ``max_tokens``: tokens to generate at most. ``temperature``: 0 is greedy (the default).
    ``top_p`` (0 to 1], ``top_k`` (0 is off) and ``min_p`` [0, 1] cut the distribution, in the order
    top_k, top_p, min_p, after the temperature. ``seed``: same seed, same prompt, same text; without
    one the seed follows from the session's seed and the op's place in its fork tree. ``stop``:
    strings that end the text and are not part of it. ``stop_token_ids``: tokens that end it.
    ``ignore_eos``: the model's own end token does not end it. ``logprobs``: also return each
    token's log-probability.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def check(self) -> SamplingParams:
        """Itself, or ``BadArgument`` naming the field that is wrong."""
        checks = (
            ("max_tokens", _is_whole(self.max_tokens, 1, MAX_INT), "a whole number, at least 1"),
            ("temperature", _is_number(self.temperature, 0.0, 100.0), "a number between 0 and 100"),
            ("top_p", _is_number(self.top_p, 0.0, 1.0) and self.top_p > 0, "above 0 and at most 1"),
            ("top_k", _is_whole(self.top_k, 0, MAX_INT), "0 (off) or a positive whole number"),
            ("min_p", _is_number(self.min_p, 0.0, 1.0), "a number between 0 and 1"),
            ("seed", self.seed is None or _is_whole(self.seed, 0, 2**63 - 1), "a whole number below 2**63"),
            ("stop", _are_stops(self.stop), f"at most {MAX_STOPS} strings, of 1 to {MAX_STOP_CHARS} chars"),
            ("stop_token_ids", _are_ids(self.stop_token_ids), "token ids, 0 or more"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "True or False"),
            ("logprobs", isinstance(self.logprobs, bool), "True or False"),
        )
        for field, holds, wanted in checks:
            if not holds:
                raise BadArgument(f"gen: {field} must be {wanted}, not {getattr(self, field)!r}")
        return self


def derived_seed(session_seed: int, run: int, path: tuple[int, ...], ordinal: int) -> int:
    """The seed of a gen that names none: it follows from the session's seed, the run's index, the path in
    the fork tree and the gen's place in the state, so that a replay draws the same."""
    place = f"{session_seed}/{run}/{path}/{ordinal}"
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "big") >> 1


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float) -> bool:
    # Not a number is in no range.
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _are_stops(values: object) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) <= MAX_STOPS
        and all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in values)
    )


def _are_ids(values: object) -> bool:
    return isinstance(values, tuple) and all(_is_whole(token_id, 0, MAX_INT) for token_id in values)
