"""How a token is chosen: the parameters that travel with each gen, and their checks."""

from __future__ import annotations

import msgspec

from agentflow.errors import BadArgument

MAX_STOPS = 64
MAX_STOP_CHARS = 1024


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
        ranges = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "a whole number below 2**63"),
            ("stop", len(self.stop) <= MAX_STOPS, f"at most {MAX_STOPS} strings"),
            ("stop", all(0 < len(s) <= MAX_STOP_CHARS for s in self.stop), "strings of 1 to 1024 characters"),
            ("stop_token_ids", all(t >= 0 for t in self.stop_token_ids), "token ids"),
        )
        for field, holds, wanted in ranges:
            if not holds:
                raise BadArgument(f"gen: {field} must be {wanted}, not {getattr(self, field)!r}")
        return self
