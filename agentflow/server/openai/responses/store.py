"""Responses that later turns continue, and conversations, in memory.

Each response has the conversation up to its end, so that a turn which names it sends only new items and finds
the whole prefix in the cache; so has a conversation. Tenants see only their own. When the memory is full, the
oldest of the tenant with the most is dropped; a response or conversation is also dropped when it has expired,
which a conversation does after its last change.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from agentflow.protocol.chat import Message
from agentflow.server.openai.responses.background import EventLog

# The memory of a response beside its texts, of an item, and of each message that a response refers to.
_RESPONSE_BYTES = 2_000
_ITEM_BYTES = 1_000
_REFERENCE_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """``body``: the response as JSON. ``messages``: the conversation up to its end, without instructions;
    empty if it failed or was cancelled. ``input_items`` and ``output_items``: of this turn. ``new_chars``:
    the texts that ``messages`` does not share with an earlier response. ``events``: of a background response
    that is streamed."""

    id: str
    body: bytes
    messages: tuple[Message, ...]
    input_items: tuple[dict[str, Any], ...]
    output_items: tuple[dict[str, Any], ...]
    new_chars: int
    is_background: bool = False
    events: EventLog | None = None

    @property
    def items(self) -> tuple[dict[str, Any], ...]:
        """The items of this turn."""
        return (*self.input_items, *self.output_items)

    @property
    def num_bytes(self) -> int:
        """An estimate of its memory. Texts are in the messages and in the items."""
        num_bytes = _RESPONSE_BYTES + 2 * len(self.body) + 3 * self.new_chars
        num_bytes += _REFERENCE_BYTES * len(self.messages)
        return num_bytes + (0 if self.events is None else self.events.num_bytes)


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """``items`` as they are listed, and ``messages`` as they are for the model. ``created_at``: Unix time.
    ``item_bytes``: the size of the items as JSON."""

    id: str
    created_at: int
    metadata: dict[str, str]
    items: tuple[dict[str, Any], ...] = ()
    messages: tuple[Message, ...] = ()
    item_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """An estimate of its memory."""
        texts = sum([len(key) + len(value) for key, value in self.metadata.items()])
        return _RESPONSE_BYTES + 2 * texts + 4 * self.item_bytes + _ITEM_BYTES * len(self.items)


Stored: TypeAlias = StoredResponse | StoredConversation


class ResponseStore:
    """``max_bytes``: the memory of all responses and conversations. ``lifetime_s``: how long one is kept.

    >>> store = ResponseStore(max_bytes=10_000, lifetime_s=60)
    >>> store.add("tenant", StoredResponse("resp_1", b"{}", (), (), (), 0))
    >>> store.find("tenant", "resp_1").body, store.find("another", "resp_1")
    (b'{}', None)
    """

    def __init__(
        self, max_bytes: int, lifetime_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._of_tenant: dict[str, OrderedDict[str, tuple[float, Stored]]] = {}
        # Of each item, by what contains it: a response and its conversation have the same ones.
        self._items: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
        self._num_bytes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """The memory of all that has not expired."""
        self._drop_expired()
        return sum(self._num_bytes.values())

    def add(self, tenant: str, stored: Stored) -> bool:
        """Stores a response or a conversation, in place of an earlier one with its id. False for one that is
        larger than the store, which is not stored."""
        if stored.num_bytes > self._max_bytes:
            return False
        self._remove(tenant, stored.id)
        own = self._of_tenant.setdefault(tenant, OrderedDict())
        own[stored.id] = (self._clock() + self._lifetime_s, stored)
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + stored.num_bytes
        for item in stored.items:
            self._items.setdefault((tenant, item["id"]), {})[stored.id] = item
        while self.num_bytes > self._max_bytes:
            largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            self._remove(largest, next(iter(self._of_tenant[largest])))
        return True

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The tenant's response with this id, if it is still there."""
        found = self._find(tenant, response_id)
        return found if isinstance(found, StoredResponse) else None

    def find_conversation(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        """The tenant's conversation with this id, if it is still there."""
        found = self._find(tenant, conversation_id)
        return found if isinstance(found, StoredConversation) else None

    def _find(self, tenant: str, stored_id: str) -> Stored | None:
        # Changes nothing: large bodies are read in threads.
        expires_s, found = self._of_tenant.get(tenant, OrderedDict()).get(stored_id, (0.0, None))
        return found if expires_s > self._clock() else None

    def find_item(self, tenant: str, item_id: str) -> dict[str, Any] | None:
        """The item with this id of one of the tenant's responses or conversations."""
        containers = [*self._items.get((tenant, item_id), {}).items()]
        return next((item for stored_id, item in containers if self._find(tenant, stored_id)), None)

    def delete(self, tenant: str, stored_id: str) -> bool:
        """Whether the response or conversation was there. Responses that continue it are kept."""
        self._drop_expired()
        return self._remove(tenant, stored_id)

    def _remove(self, tenant: str, stored_id: str) -> bool:
        own = self._of_tenant.get(tenant)
        found = None if own is None else own.pop(stored_id, None)
        if own is None or found is None:
            return False
        stored = found[1]
        self._num_bytes[tenant] -= stored.num_bytes
        for item in stored.items:
            containers = self._items.get((tenant, item["id"]), {})
            containers.pop(stored.id, None)
            if not containers:
                self._items.pop((tenant, item["id"]), None)
        if not own:
            del self._of_tenant[tenant], self._num_bytes[tenant]
        return True

    def _drop_expired(self) -> None:
        now_s = self._clock()
        for tenant, own in list(self._of_tenant.items()):
            while own and next(iter(own.values()))[0] <= now_s:
                self._remove(tenant, next(iter(own)))
