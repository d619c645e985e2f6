"""How often each token occurs in a request, as arrays that grow with it: what penalties are reckoned from."""

from __future__ import annotations

import numpy as np

from agentflow.server.core.batch import FloatArray, IntArray
from agentflow.server.core.request import Request


class TokenCounts:
    """The different tokens of one request, and how often each was generated. ``with_prompt``: those that
    stand only in the prompt are among them, with 0.

    Everything follows from the request's tokens, so nothing has to be kept when it gives way or its
    engine dies. A step costs what its new tokens cost.
    """

    def __init__(self, request: Request, *, with_prompt: bool) -> None:
        prompt = request.tokens[: request.num_prompt]
        known = np.unique(prompt) if with_prompt else prompt[:0]
        self._request = request
        self._num_read = request.num_prompt
        self._num_ids = len(known)
        room = len(known) + max(16, request.num_generated + 1)
        self._ids: IntArray = np.zeros(room, dtype=np.int64)
        self._counts: FloatArray = np.zeros(room, dtype=np.float32)
        self._ids[: len(known)] = known
        self._place_of: dict[int, int] = {token: place for place, token in enumerate(known.tolist())}

    def now(self) -> tuple[IntArray, FloatArray]:
        """Token ids and counts, brought up to date. Read them before the next call."""
        request = self._request
        for token in request.tokens[self._num_read : request.num_tokens].tolist():
            place = self._place_of.get(token)
            if place is None:
                place = self._add(token)
            self._counts[place] += 1
        self._num_read = request.num_tokens
        return self._ids[: self._num_ids], self._counts[: self._num_ids]

    def _add(self, token: int) -> int:
        place = self._num_ids
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token
        self._place_of[token] = place
        self._num_ids = place + 1
        return place
