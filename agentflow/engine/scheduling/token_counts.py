"""How often each token occurs in a request, as arrays that grow with it: what penalties are reckoned from."""

from __future__ import annotations

import numpy as np

from agentflow.engine.batch import FloatArray, IntArray
from agentflow.engine.request import Request


class TokenCounts:
    """The different tokens of one request, and how often each was generated. ``with_prompt``: those that
    stand only in the prompt are among them, with 0.

    Everything follows from the request's tokens, so nothing has to be kept when it is preempted or its
    engine ends. A step costs what its new tokens cost. Whatever replaces generated tokens calls ``keep``.
    """

    def __init__(self, request: Request, *, with_prompt: bool) -> None:
        prompt = request.tokens[: request.num_prompt]
        known = np.unique(prompt) if with_prompt else prompt[:0]
        self._request = request
        self._counted: list[int] = []  # the generated tokens that are counted, in their order
        self._num_fixed = self._num_ids = len(known)
        room = len(known) + max(16, request.num_generated + 1)
        self._ids: IntArray = np.zeros(room, dtype=np.int64)
        self._counts: FloatArray = np.zeros(room, dtype=np.float32)
        self._ids[: len(known)] = known
        self._place_of: dict[int, int] = {token: place for place, token in enumerate(known.tolist())}

    def now(self) -> tuple[IntArray, FloatArray]:
        """Token ids and counts, brought up to date. Read them before the next call."""
        request = self._request
        first_new = request.num_prompt + len(self._counted)
        for token in request.tokens[first_new : request.num_tokens].tolist():
            place = self._place_of.get(token)
            if place is None:
                place = self._add(token)
            self._counts[place] += 1
            self._counted.append(token)
        return self._ids[: self._num_ids], self._counts[: self._num_ids]

    def keep(self, num_generated: int) -> None:
        """Of the generated tokens only the first ``num_generated`` are still what they were."""
        for token in self._counted[num_generated:]:
            place = self._place_of[token]
            self._counts[place] -= 1
            if self._counts[place] == 0 and place >= self._num_fixed:
                self._remove(token, place)
        del self._counted[num_generated:]

    def _add(self, token: int) -> int:
        place = self._num_ids
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._counts[place] = 0
        self._place_of[token] = place
        self._num_ids = place + 1
        return place

    def _remove(self, token: int, place: int) -> None:
        """The last token moves to its place."""
        self._num_ids -= 1
        last = int(self._ids[self._num_ids])
        self._ids[place], self._counts[place] = last, self._counts[self._num_ids]
        self._place_of[last] = place
        del self._place_of[token]
