"""Which prefixes running requests are about to compute, so that waiting requests do not compute them too.

A prefix in progress is found by its next token that is not cached. A waiting request that needs the same
token next has the same prefix cached, because running requests commit their prompts to the cache step by
step.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentflow.engine.request import CacheIdentity, Request

_Place = tuple[CacheIdentity, int, int]  # identity, position and id of the next token that is not cached


class InProgressPrefixes:
    """Running requests with more than one token to compute, and selects until they are done, in the order in
    which they were admitted. A request leaves when its last chunk has run."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[Request, _Place | None]] = {}
        self._at: dict[_Place, list[Request]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter([request for request, _ in self._requests.values()])

    def __contains__(self, request: Request) -> bool:
        return request.id in self._requests

    def will_compute(self, request: Request, match: int) -> bool:
        """Whether a running request is about to compute the first token that ``request``, of which ``match``
        tokens are cached, could then take from the cache."""
        if match >= request.num_reusable:
            return False
        here = self._at.get((request.extra_key, match, int(request.tokens[match])))
        if here is None:
            return False
        run = request.run(match)
        return any(other.run(match) == run for other in here)

    def add(self, request: Request) -> None:
        """The request was just admitted."""
        assert request.committed is not None
        next_index = request.committed.num_tokens
        if request.num_tokens - next_index <= 1 and request.tree is not None:
            self._requests[request.id] = request, None  # one token or nodes: not worth waiting for
            return
        place = (request.extra_key, next_index, int(request.tokens[next_index]))
        self._requests[request.id] = request, place
        here = self._at.get(place)
        if here is None:
            self._at[place] = [request]
        else:
            here.append(request)

    def advanced(self, request: Request, num_tokens: int, num_nodes: int) -> None:
        """The request has computed its first ``num_tokens`` tokens and ``num_nodes`` nodes. Removes it if at
        most one token is left (for a select: none). Unknown requests are ignored."""
        known = self._requests.get(request.id)
        if known is not None:
            self._leave(*known)
            if request.num_left_after(num_tokens, num_nodes) > (1 if request.tree is None else 0):
                self.add(request)  # keeps its place in the order
            else:
                del self._requests[request.id]

    def discard(self, request: Request) -> None:
        """The request no longer runs. Unknown requests are ignored."""
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
