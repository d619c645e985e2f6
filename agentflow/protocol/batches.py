"""The interface between a map and the backend that runs its generations in batches of a vendor.

The map says when all generations of a stage have been asked for, keeps the record of each batch, and shows
the progress. The backend collects the generations, sends them as batches, and follows these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from agentflow.errors import NotSupported
from agentflow.protocol.backend import Backend


class BatchRecord(msgspec.Struct, omit_defaults=True):
    """One batch. It is kept before it is sent, so that an interrupted map finds the batch at the vendor."""

    tag: str  # chosen here; the vendor keeps it if it can
    requests: tuple[str, ...] = ()  # their ids in the batch
    sent_at: float = 0.0  # in seconds since 1970
    batch: str = ""  # the vendor's id; empty before the vendor has answered
    is_read: bool = False  # its results were received once


@dataclass(frozen=True)
class BatchCounts:
    """The requests of the batches that run: of all, how many have ended, and of these how many failed."""

    num_batches: int = 0
    num_requests: int = 0
    num_done: int = 0
    num_failed: int = 0


class BatchNotes(Protocol):
    """The map's side."""

    @property
    def is_kept(self) -> bool:
        """Whether records outlive the map: then its batches go on after its end."""

    @property
    def is_fed(self) -> bool:
        """Whether the map begins no more inputs before one of the running ones ends."""

    def records(self) -> Sequence[BatchRecord]:
        """The batches of earlier maps, in the order in which they were sent."""

    async def keep(self, record: BatchRecord) -> None:
        """Keeps a new record, or its changes, before it returns."""

    def show(self, counts: BatchCounts) -> None:
        """Shows the progress."""


def batched(backend: Backend, notes: BatchNotes, model: str) -> Backend:
    """The backend for one map whose generations run in batches. ``NotSupported`` if it has none.

    Args:
        backend: The backend of the session.
        notes: The map's side.
        model: The name of the model, for the error.
    """
    batches: Callable[[BatchNotes], Backend] | None = getattr(backend, "batches", None)
    if batches is None:
        raise NotSupported(
            f"{model} does not run in batches here: leave out batch=True, or open the session on a model of "
            "OpenAI or Anthropic",
            param="batch",
        )
    return batches(notes)
