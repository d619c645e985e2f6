"""Which prompts are being computed just now: whoever needs the same tokens next waits for them.

Found by the token that a running request computes next: a waiting request that needs it has the
same prefix cached, for what runs commits its tokens step by step.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentflow.engine.request import CacheIdentity, Request

_Place = tuple[CacheIdentity, int, int]


class InProgressPrefixes:
    """Running requests with more than one row to compute, and selects until they are done. ``moved`` when
    one got further."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[Request, _Place | None]] = {}
        self._at: dict[_Place, list[Request]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter([request for request, _ in self._requests.values()])

    def __contains__(self, request: Request) -> bool:
        return request.id in self._requests

    def add(self, request: Request) -> None:
        """It has just been admitted."""
        next_index = request.num_computed
        if request.num_tokens - next_index <= 1 and request.tree is not None:
            self._requests[request.id] = request, None  # nobody waits for one row, or for nodes
            return
        place = (request.extra_key, next_index, int(request.tokens[next_index]))
        self._requests[request.id] = request, place
        here = self._at.get(place)
        if here is None:
            self._at[place] = [request]
        else:
            here.append(request)

    def moved(self, request: Request) -> None:
        """It has computed more; it leaves when one row or none is left, a select when none is. Unknown
        ones are ignored."""
        known = self._requests.get(request.id)
        if known is not None:
            self._leave(*known)
            if request.num_to_compute > (1 if request.tree is None else 0):
                self.add(request)  # in its old place among the requests
            else:
                del self._requests[request.id]

    def discard(self, request: Request) -> None:
        """It runs no longer. Unknown ones are ignored."""
        known = self._requests.pop(request.id, None)
        if known is not None:
            self._leave(*known)

    def _leave(self, request: Request, place: _Place | None) -> None:
        if place is None:
            return
        here = self._at[place]
        if len(here) == 1:
            del self._at[place]
        else:
            here.remove(request)

    def will_compute(self, request: Request, match: int) -> bool:
        """Whether the first token that the request has not got cached, and could have from the cache,
        is about to be computed by another; so many of its tokens are cached."""
        if match >= request.num_reusable:
            return False
        here = self._at.get((request.extra_key, match, int(request.tokens[match])))
        if here is None:
            return False
        run = request.run(match)
        return any(other.run(match) == run for other in here)
