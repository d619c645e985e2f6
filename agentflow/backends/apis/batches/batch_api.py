"""The interface of ``Collector`` to the batch endpoints of a vendor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from agentflow.backends.apis.http.event_stream import ServerEvent
from agentflow.errors import AgentflowError, Overloaded, RequestRefused
from agentflow.protocol.batches import BatchRecord

BatchOutcome: TypeAlias = bytes | AgentflowError
"""The message that answers a request, as JSON, or its error."""
Receive: TypeAlias = Callable[[str, BatchOutcome], None]
"""Receives the id of a request and its outcome."""

FIND_BEFORE_S = 300.0
"""How far the vendor's clock may be behind."""


@dataclass(frozen=True)
class BatchState:
    """The state of a batch.

    Attributes:
        has_ended: No more of its requests will run.
        num_done: The requests that have ended.
        num_failed: The requests among these that failed.
        failure: The error of a batch that was refused as a whole.
        missing: The error of a request without an outcome, once the batch has ended.
        files: Where the outcomes are.
    """

    has_ended: bool
    num_done: int = 0
    num_failed: int = 0
    failure: AgentflowError | None = None
    missing: AgentflowError | None = None
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A batch at the vendor. ``is_certain``: it is known to be the right one; otherwise, the ids of its
    requests will show it."""

    batch: str
    is_certain: bool


class BatchApi(Protocol):
    """The batch endpoints of one vendor.

    Attributes:
        max_requests: The most requests of a batch.
        max_bytes: The largest sum of their lines.
    """

    max_requests: int
    max_bytes: int

    def line(self, request_id: str, path: str, fields: Mapping[str, msgspec.Raw]) -> bytes:
        """A request as a batch has it. ``fields``: its body, which asks for no stream."""

    async def create(self, path: str, lines: Sequence[bytes], tag: str, *, is_shielded: bool) -> str:
        """Sends a batch of requests to one path; returns its id. An error leaves open whether it exists.
        ``is_shielded``: a cancellation waits for the vendor's answer."""

    async def find(self, record: BatchRecord) -> Sequence[Candidate]:
        """The batches at the vendor that may be one whose answer to ``create`` was lost."""

    async def state(self, batch: str) -> BatchState:
        """The state of a batch."""

    async def read(self, batch: str, state: BatchState, receive: Receive) -> None:
        """Receives the outcomes of a batch that has ended. They may come more than once."""

    async def cancel(self, batch: str) -> None:
        """Cancels a batch."""

    def events(self, path: str, message: bytes) -> Iterable[ServerEvent]:
        """The events of a stream with this message, which answers a request to ``path``."""


def expired(batch: str, server: str) -> AgentflowError:
    """The error of a request that did not run within the time of its batch."""
    return Overloaded(
        f"batch {batch} of {server} expired before it ran this request: run the map again, which sends the "
        "request again"
    )


def batch_cancelled(batch: str, server: str) -> AgentflowError:
    """The error of a request whose batch was cancelled at the vendor."""
    return RequestRefused(
        f"batch {batch} was cancelled at {server} before it ran this request: run the map again, which sends "
        "the request again"
    )
