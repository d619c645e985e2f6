"""The interface between a map and the backend that runs its generations in batches of a vendor.

The map knows when all generations of a stage have been requested and when an input runs again. It stores the
record of each batch, and shows the progress. The backend collects the generations, sends them as batches,
tracks the batches, and keeps the answers of an input for its next attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from agentflow.errors import NotSupported
from agentflow.protocol.backend import Backend


class BatchRecord(msgspec.Struct, omit_defaults=True):
    """One batch. It is stored before it is sent, so that an interrupted map can find it at the vendor."""

    tag: str  # chosen by the backend; the vendor stores it, if supported
    requests: tuple[str, ...] = ()  # their ids in the batch
    sent_at: float = 0.0  # in seconds since 1970
    batch: str = ""  # the vendor's id; empty before the vendor has answered
    is_read: bool = False  # its results have been received
    rejected: tuple[str, ...] = ()  # the ids of requests whose answers must not be used again


@dataclass(frozen=True)
class BatchCounts:
    """The numbers of requests in running batches: all, ended ones (with failed ones), and failed ones."""

    num_batches: int = 0
    num_requests: int = 0
    num_done: int = 0
    num_failed: int = 0


class InputAnswers(Protocol):
    """The backend's side: the answers to each input's requests, by the label of its states."""

    async def reject(self, label: str, texts: Collection[str]) -> None:
        """The input has failed because generated values were invalid: no later attempt uses their answers.

        Args:
            label: The label of the input.
            texts: The invalid texts. If no answer has one of them, all answers are rejected.
        """

    def repeat(self, label: str) -> None:
        """The next attempt begins. Its requests get the answers of the previous attempt."""

    def end(self, label: str) -> None:
        """The input has ended: its answers are no longer needed."""


class BatchNotes(Protocol):
    """The map's side."""

    @property
    def repeats(self) -> bool:
        """Whether a failed input runs again, so that its answers are kept."""

    @property
    def is_kept(self) -> bool:
        """Whether records outlive the map, so that its batches continue after its end."""

    def connect(self, answers: InputAnswers) -> None:
        """From now on, notifies ``answers`` when inputs run again or have ended."""

    @property
    def is_fed(self) -> bool:
        """Whether the map begins no further inputs until a running one ends."""

    def records(self) -> Sequence[BatchRecord]:
        """The batches of earlier maps, in the order in which they were sent."""

    async def keep(self, record: BatchRecord) -> None:
        """Stores a new record, or its changes, before it returns. ``rejected`` has only the ids since the
        last change."""

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
