"""Finds the prepared images of states in prompts.

A prompt is a list of token ids. Ids below 0 are pseudo-tokens, which identify an image, so the ids are enough
to find the images of a prompt, however it was made. An image is known here while a state or an unfinished
request holds it.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from weakref import finalize, ref

import numpy as np

from agentflow.engine.media_run import MediaPiece, PreparedMedium, SubmittedRun, pseudo_tokens
from agentflow.errors import EngineFailed, Overloaded
from agentflow.runtime.limits import tenant_part

MOST_BYTES = 2 * 2**30
"""The bytes of the pixels of all images together."""


class _Known:
    """An image, and its runs by their first ids."""

    def __init__(self, medium: PreparedMedium, tenant: str) -> None:
        self.medium = ref(medium)
        self.tenant = tenant
        self.num_bytes = medium.nbytes
        self.runs: list[tuple[list[int], MediaPiece]] = []
        for piece in medium.pieces:
            if not isinstance(piece, str):
                self.runs.append((pseudo_tokens(piece.at(medium.identity, 0)).tolist(), piece))


class KnownMedia:
    """The images of one engine's clients. Call all methods in the event loop's thread; images may be released
    in any thread.

    Args:
        most_bytes: The most bytes of pixels; each tenant may use a part of them.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._known: dict[str, _Known] = {}
        self._by_first_id: dict[int, list[tuple[str, int]]] = {}
        self._released: deque[str] = deque()
        self._bytes_of: Counter[str] = Counter()

    def add(self, medium: PreparedMedium, tenant: str) -> tuple[PreparedMedium, bool]:
        """Returns the object for the image, which the state must hold, and whether it is new. Tenants do not
        share objects, so the time of a request does not reveal the images of other tenants. Raises
        ``Overloaded`` if the images of the tenant, or of all tenants, take too much memory."""
        if tenant:
            identity = hashlib.sha256(f"{tenant}\0{medium.identity}".encode()).hexdigest()
            medium = replace(medium, identity=identity)
        known = self._known.get(medium.identity)
        if known is not None and (same := known.medium()) is not None:
            return same, False
        total, own = sum(self._bytes_of.values()), self._bytes_of[tenant]
        most = tenant_part(self._most_bytes, tenant)
        if total + medium.nbytes > self._most_bytes or own + medium.nbytes > most:
            raise Overloaded(
                "the images of open states take too much memory: close states that you no longer need, or "
                "try again later",
                param="image",
            )
        if known is not None:
            self._forget(medium.identity)
        medium = replace(medium)  # an object that only states hold
        new = self._known[medium.identity] = _Known(medium, tenant)
        self._bytes_of[tenant] += new.num_bytes
        for number, (ids, _) in enumerate(new.runs):
            self._by_first_id.setdefault(ids[0], []).append((medium.identity, number))
        finalize(medium, self._released.append, medium.identity).atexit = False
        return medium, True

    def runs_in(self, token_ids: Sequence[int]) -> tuple[list[SubmittedRun], list[PreparedMedium]]:
        """Returns the runs in a prompt, in order, and their images. Raises ``EngineFailed`` for ids below 0
        that belong to no image."""
        try:
            if min(token_ids, default=0) >= 0:
                return [], []
        except TypeError:  # the engine rejects it
            return [], []
        runs: list[SubmittedRun] = []
        media: dict[str, PreparedMedium] = {}
        done = 0
        for at in np.flatnonzero(np.array(token_ids) < 0).tolist():
            if at < done:
                continue
            run, medium = self._run_at(token_ids, at)
            runs.append(run)
            media[medium.identity] = medium
            done = at + len(run.positions) // (8 * run.num_axes)
        return runs, list(media.values())

    def _run_at(self, token_ids: Sequence[int], at: int) -> tuple[SubmittedRun, PreparedMedium]:
        for identity, number in self._by_first_id.get(token_ids[at], ()):
            known = self._known[identity]
            ids, piece = known.runs[number]
            medium = known.medium()
            if medium is not None and list(token_ids[at : at + len(ids)]) == ids:
                return piece.at(identity, at).submitted(), medium
        raise EngineFailed("a prompt has tokens of an image that is no longer known")

    def released(self) -> list[str]:
        """Forgets the images that no state holds any longer. Returns their identities, once each."""
        gone: list[str] = []
        while self._released:
            identity = self._released.popleft()
            known = self._known.get(identity)
            if known is not None and known.medium() is None:  # else it was added again
                self._forget(identity)
                gone.append(identity)
        return gone

    def _forget(self, identity: str) -> None:
        known = self._known.pop(identity)
        self._bytes_of[known.tenant] -= known.num_bytes
        if not self._bytes_of[known.tenant]:
            del self._bytes_of[known.tenant]
        for ids, _ in known.runs:
            here = [one for one in self._by_first_id.pop(ids[0], ()) if one[0] != identity]
            if here:
                self._by_first_id[ids[0]] = here
