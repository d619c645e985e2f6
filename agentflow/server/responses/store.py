"""Responses that later turns continue, and conversations, in memory.

A response or conversation has all messages up to its end, so that a turn that refers to it sends only new
items, and its whole prefix can be in the cache. Tenants see only their own. When the memory is full, the
oldest records of the tenant with the most are dropped. A record is also dropped when it has expired; the
lifetime of a conversation begins again with each change. Responses of one conversation share its messages,
which count until the last of these responses is gone.
"""

from __future__ import annotations

import heapq
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentflow.protocol.bounds.sized import sized
from agentflow.protocol.chat import Message
from agentflow.server.responses.background import EventLog
from agentflow.server.responses.item import Item

_ENTRY_BYTES = 2_000
"""The memory of a response or conversation, without its JSON, texts and items."""
_REFERENCE_BYTES = 8
_DROPPED_AT_ONCE = 5_000
"""The limit of entries that one addition drops, so that it takes milliseconds. The next one continues."""


class History:
    """A conversation up to the end of a turn: the messages of earlier turns, which several histories may
    share, and the turn's own. ``num_bytes``: the memory of the turn's messages. ``total_bytes``: the memory
    of all messages. ``shared_id``: the turn's id in a store that several fronts share."""

    __slots__ = ("__weakref__", "before", "num_bytes", "own", "shared_id", "total_bytes")

    def __init__(self, before: History | None, own: Sequence[Message]) -> None:
        self.before = before
        self.own = tuple(own)
        self.shared_id: str | None = None
        self.num_bytes = _REFERENCE_BYTES * len(self.own) + sized(*self.own)
        self.total_bytes: int = self.num_bytes + (0 if before is None else before.total_bytes)

    def messages(self) -> list[Message]:
        """All messages, in order."""
        turns: list[Sequence[Message]] = []
        history: History | None = self
        while history is not None:
            turns.append(history.own)
            history = history.before
        return [message for own in reversed(turns) for message in own]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended, or that another front runs in the background."""

    id: str
    body: bytes  # the response as JSON
    history: History | None  # up to its end, without instructions; None unless it was completed
    input_items: tuple[Item, ...]  # the input of this turn
    output_items: tuple[Item, ...]
    is_background: bool = False
    events: EventLog | None = None  # the events of a streamed background response
    runs_on: str | None = None  # the front that runs it, or did when it was lost

    @property
    def items(self) -> tuple[Item, ...]:
        """The items of this turn."""
        return (*self.input_items, *self.output_items)

    @property
    def num_bytes(self) -> int:
        """The memory of the response, without the history."""
        num_bytes = _ENTRY_BYTES + len(self.body) + sum([item.num_bytes for item in self.items])
        return num_bytes + (0 if self.events is None else self.events.num_bytes)


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation object."""

    id: str
    created_at: int  # Unix time
    metadata: dict[str, str]
    items: tuple[Item, ...] = ()  # as clients see them
    messages: tuple[Message, ...] = ()  # as the model sees them
    item_bytes: int = 0  # the memory of the items

    @property
    def num_bytes(self) -> int:
        """The memory of the conversation. Messages share their texts with the items."""
        references = _REFERENCE_BYTES * (len(self.items) + len(self.messages))
        return _ENTRY_BYTES + sized(self.metadata) + self.item_bytes + references


StoredRecord: TypeAlias = StoredResponse | StoredConversation


class ResponseStore:
    """Responses and conversations. ``max_bytes``: the memory of all. ``lifetime_s``: the lifetime of each.

    >>> store = ResponseStore(max_bytes=10_000, lifetime_s=60)
    >>> store.add("tenant", StoredResponse("resp_1", b"{}", None, (), ()))
    True
    >>> store.find("tenant", "resp_1").body, store.find("another", "resp_1")
    (b'{}', None)
    """

    def __init__(
        self, max_bytes: int, lifetime_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._lifetime_s = lifetime_s
        self._clock = clock
        # By tenant and id: the time of expiry, the size when it was stored, and the record.
        self._of_tenant: dict[str, OrderedDict[str, tuple[float, int, StoredRecord]]] = {}
        # By tenant and item id: the item in each response or conversation that contains it, by its id.
        self._items: dict[tuple[str, str], dict[str, Item]] = {}
        self._num_bytes: dict[str, int] = {}
        self._histories: weakref.WeakSet[History] = weakref.WeakSet()
        # The tenants and sizes of freed histories; other threads may free them.
        self._gone: deque[tuple[str, int]] = deque()

    @property
    def num_bytes(self) -> int:
        """The memory of all records that have not expired."""
        self._drop_expired()
        self._count_gone()
        return sum(self._num_bytes.values())

    def add(self, tenant: str, stored: StoredRecord) -> bool:
        """Stores a response or a conversation, or replaces the one with its id. Returns False, without
        storing it, if it is larger than the store."""
        num_bytes = stored.num_bytes
        history = stored.history if isinstance(stored, StoredResponse) else None
        if num_bytes + (0 if history is None else history.total_bytes) > self._max_bytes:
            return False
        self._drop_expired()
        self._remove(tenant, stored.id)
        own = self._of_tenant.setdefault(tenant, OrderedDict())
        own[stored.id] = (self._clock() + self._lifetime_s, num_bytes, stored)
        self._count(tenant, num_bytes)
        if history is not None and history not in self._histories:
            self._histories.add(history)
            self._count(tenant, history.num_bytes)
            gone = (tenant, history.num_bytes)
            weakref.finalize(history, self._gone.append, gone).atexit = False
        for item in stored.items:
            self._items.setdefault((tenant, item.id), {})[stored.id] = item
        self._make_room(tenant, stored.id)
        return True

    def _count(self, tenant: str, num_bytes: int) -> None:
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + num_bytes
        if not self._num_bytes[tenant]:
            del self._num_bytes[tenant]

    def _count_gone(self) -> None:
        while self._gone:
            tenant, num_bytes = self._gone.popleft()
            self._count(tenant, -num_bytes)

    def _make_room(self, tenant: str, new_id: str) -> None:
        """Drops the oldest records of the tenant with the most, except the new one, until the rest fits."""
        self._count_gone()
        total = sum(self._num_bytes.values())
        if total <= self._max_bytes:
            return
        largest = [(-num_bytes, name) for name, num_bytes in self._num_bytes.items()]
        heapq.heapify(largest)
        for _ in range(_DROPPED_AT_ONCE):
            if total <= self._max_bytes or not largest:
                return
            before, name = -largest[0][0], largest[0][1]
            oldest = next(iter(self._of_tenant.get(name, ())), None)
            if oldest is None or (name == tenant and oldest == new_id):
                heapq.heappop(largest)  # running turns hold the rest of its memory
                continue
            self._remove(name, oldest)
            self._count_gone()
            left = self._num_bytes.get(name, 0)
            total -= before - left
            heapq.heapreplace(largest, (-left, name))

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The tenant's response with this id, if it is still stored."""
        found = self._find(tenant, response_id)
        return found if isinstance(found, StoredResponse) else None

    def find_conversation(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        """The tenant's conversation with this id, if it is still stored."""
        found = self._find(tenant, conversation_id)
        return found if isinstance(found, StoredConversation) else None

    def _find(self, tenant: str, stored_id: str) -> StoredRecord | None:
        # Must not change the store: this also runs in threads, for large bodies.
        expires_s, _, found = self._of_tenant.get(tenant, OrderedDict()).get(stored_id, (0.0, 0, None))
        return found if expires_s > self._clock() else None

    def find_item(self, tenant: str, item_id: str) -> Item | None:
        """The item with this id of one of the tenant's responses or conversations."""
        containers = [*self._items.get((tenant, item_id), {}).items()]
        return next((item for stored_id, item in containers if self._find(tenant, stored_id)), None)

    def delete(self, tenant: str, stored_id: str) -> bool:
        """Deletes a response or conversation. Returns whether it existed. Responses that continue it are
        kept."""
        self._drop_expired()
        return self._remove(tenant, stored_id)

    def _remove(self, tenant: str, stored_id: str) -> bool:
        own = self._of_tenant.get(tenant)
        found = None if own is None else own.pop(stored_id, None)
        if own is None or found is None:
            return False
        _, num_bytes, stored = found
        self._count(tenant, -num_bytes)
        for item in stored.items:
            containers = self._items.get((tenant, item.id), {})
            containers.pop(stored.id, None)
            if not containers:
                self._items.pop((tenant, item.id), None)
        if not own:
            del self._of_tenant[tenant]
        return True

    def _drop_expired(self) -> None:
        now_s = self._clock()
        for tenant, own in list(self._of_tenant.items()):
            while own and next(iter(own.values()))[0] <= now_s:
                self._remove(tenant, next(iter(own)))
