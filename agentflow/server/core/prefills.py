"""Which prompts are being computed just now: whoever needs the same tokens next waits for them.

Found by the token that a running request computes next: a waiting request that needs it has the
same prefix cached, for what runs commits its tokens step by step.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentflow.server.core.request import CacheIdentity, Request

_Place = tuple[CacheIdentity, int, int]


class Prefills:
    """Running requests with more than one row to compute. ``moved`` when one got further."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._place_of: dict[int, _Place] = {}
        self._at: dict[_Place, dict[int, Request]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __contains__(self, request: Request) -> bool:
        return request.id in self._requests

    def add(self, request: Request) -> None:
        """It has just been admitted."""
        self._requests[request.id] = request
        self._put(request)

    def moved(self, request: Request) -> None:
        """It has computed more; it leaves when one row or none is left. Unknown ones are ignored."""
        if request.num_to_compute <= 1:
            self.discard(request)
        elif request.id in self._requests:
            self._take(request)
            self._put(request)

    def discard(self, request: Request) -> None:
        """It runs no longer. Unknown ones are ignored."""
        if self._requests.pop(request.id, None) is not None:
            self._take(request)

    def will_compute(self, request: Request, match: int) -> bool:
        """Whether the first token that the request has not got cached, and could have from the cache,
        is about to be computed by another; so many of its tokens are cached."""
        if match >= request.num_reusable:
            return False
        here = self._at.get((request.extra_key, match, int(request.tokens[match])))
        if here is None:
            return False
        prefix = request.tokens[:match].tobytes()
        return any(other.tokens[:match].tobytes() == prefix for other in here.values())

    def _put(self, request: Request) -> None:
        next_index = request.num_computed
        place = (request.extra_key, next_index, int(request.tokens[next_index]))
        self._place_of[request.id] = place
        self._at.setdefault(place, {})[request.id] = request

    def _take(self, request: Request) -> None:
        place = self._place_of.pop(request.id)
        here = self._at[place]
        del here[request.id]
        if not here:
            del self._at[place]
