"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


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
