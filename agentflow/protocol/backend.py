"""The interface between the frontend and the backends that run its ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from agentflow.protocol.events import Capabilities, Event
from agentflow.protocol.ops import Op

Deliver = Callable[[Iterable[Event]], None]


class Lost(Protocol):
    """Notifies the session that the backend has failed."""

    def __call__(self, error: Exception, *, is_final: bool = True) -> None:
        """All states and variables are lost. Unless ``is_final``, the backend reconnects: the same connection
        accepts ops of new states."""


class Connection(Protocol):
    """An open backend. ``send`` does not block."""

    @property
    def models(self) -> Mapping[str, Capabilities]:
        """The capabilities of each model by the name that programs use, the default first. The object stays
        the same when the backend reconnects."""

    @property
    def is_connected(self) -> bool:
        """Whether the backend can be reached now; False while it reconnects."""

    @property
    def has_room(self) -> bool:
        """Whether ops will be sent soon. False while many wait because the connection is slow or broken."""

    def send(self, ops: Sequence[Op], /) -> None:
        """Submits all of the ops, or none: raises if one of them cannot be accepted."""

    def end(self, error: BaseException | None) -> None:
        """The session's block ended with ``error``, or normally (None). Called once, before the scope of
        ``connect`` ends, which does not receive the error."""


class Backend(Protocol):
    """Runs ops: in this process, on a server, or from a script or a recording.

    Backends whose answers a model and its address determine also have ``source``, which describes both, and
    which is equal in all processes. Keys of caches contain it."""

    def connect(self, deliver: Deliver, lost: Lost) -> AbstractAsyncContextManager[Connection]:
        """Runs the backend for the duration of the scope. It calls ``deliver`` with events, in the event
        loop, and ``lost`` if it fails before the scope ends; after a final failure it calls neither."""
