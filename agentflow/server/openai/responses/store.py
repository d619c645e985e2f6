"""Responses that later turns continue, in memory.

Each response has the conversation up to its end, so that a turn which names it sends only new items and finds
the whole prefix in the cache. Tenants see only their own. When the memory is full, the oldest response of the
tenant with the most is dropped; a response is also dropped when it has expired.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentflow.protocol.chat import Message
from agentflow.server.openai.responses.background import EventLog

# The memory of a response beside its texts, and of each message that it refers to.
_RESPONSE_BYTES = 2_000
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
    def num_bytes(self) -> int:
        """An estimate of its memory. Texts are in the messages and in the items."""
        num_bytes = _RESPONSE_BYTES + 2 * len(self.body) + 3 * self.new_chars
        num_bytes += _REFERENCE_BYTES * len(self.messages)
        return num_bytes + (0 if self.events is None else self.events.num_bytes)


class ResponseStore:
    """``max_bytes``: the memory of all responses. ``lifetime_s``: how long one is kept.

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
        self._of_tenant: dict[str, OrderedDict[str, tuple[float, StoredResponse]]] = {}
        self._items: dict[tuple[str, str], dict[str, Any]] = {}
        self._num_bytes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """The memory of all responses."""
        return sum(self._num_bytes.values())

    def add(self, tenant: str, response: StoredResponse) -> None:
        """Stores a response. One that is larger than the store is not stored."""
        if response.num_bytes > self._max_bytes:
            return
        own = self._of_tenant.setdefault(tenant, OrderedDict())
        own[response.id] = (self._clock() + self._lifetime_s, response)
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + response.num_bytes
        for item in (*response.input_items, *response.output_items):
            self._items[tenant, item["id"]] = item
        self._drop_expired()
        while self.num_bytes > self._max_bytes:
            largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            self.delete(largest, next(iter(self._of_tenant[largest])))

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The tenant's response with this id, if it is still there."""
        self._drop_expired()
        found = self._of_tenant.get(tenant, OrderedDict()).get(response_id)
        return None if found is None else found[1]

    def find_item(self, tenant: str, item_id: str) -> dict[str, Any] | None:
        """The item with this id of one of the tenant's responses."""
        self._drop_expired()
        return self._items.get((tenant, item_id))

    def delete(self, tenant: str, response_id: str) -> bool:
        """Whether the response was there. Responses that continue it are kept."""
        own = self._of_tenant.get(tenant)
        found = None if own is None else own.pop(response_id, None)
        if own is None or found is None:
            return False
        response = found[1]
        self._num_bytes[tenant] -= response.num_bytes
        for item in (*response.input_items, *response.output_items):
            self._items.pop((tenant, item["id"]), None)
        if not own:
            del self._of_tenant[tenant], self._num_bytes[tenant]
        return True

    def _drop_expired(self) -> None:
        now_s = self._clock()
        for tenant, own in list(self._of_tenant.items()):
            while own and next(iter(own.values()))[0] <= now_s:
                self.delete(tenant, next(iter(own)))
