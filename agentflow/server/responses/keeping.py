"""The interface of stores of responses and conversations, for one front and for several.

``LocalResponses`` stores them in this process (``store``), ``SharedResponses`` in Redis (``shared_store``). A
change of a conversation is atomic in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from agentflow.server.responses.item import Item
from agentflow.server.responses.store import ResponseStore, StoredConversation, StoredResponse

Change = Callable[[StoredConversation], StoredConversation]


class TooLargeToKeep(Exception):
    """A conversation would be larger than the store."""


class Responses(Protocol):
    """The responses and conversations of all tenants. A tenant finds only its own. A store in another process
    raises ``Overloaded`` while that process does not answer."""

    def check_answers(self) -> None:
        """``Overloaded`` if the store is known not to answer."""

    async def begin(self, tenant: str, stored: StoredResponse) -> None:
        """Registers a response that runs in the background, for other fronts. ``add`` replaces it."""

    async def add(self, tenant: str, stored: StoredResponse | StoredConversation) -> bool:
        """Stores a response, or a new conversation. False if it is larger than the store."""

    async def find(
        self, tenant: str, response_id: str, *, to_continue: bool = False
    ) -> StoredResponse | None:
        """The response with this id, or None. ``to_continue``: its history is needed."""

    async def find_conversation(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        """The conversation with this id, or None."""

    async def find_items(self, tenant: str, item_ids: Iterable[str]) -> Mapping[str, Item]:
        """Returns the stored items among these ids, by id."""

    async def change(self, tenant: str, conversation_id: str, change: Change) -> StoredConversation | None:
        """Replaces a conversation by the result of ``change`` and returns it; None if there is no such
        conversation. ``change`` may run several times, and its error leaves the conversation unchanged.
        ``TooLargeToKeep`` if the result is larger than the store."""

    async def delete(self, tenant: str, stored_id: str) -> bool:
        """Deletes a response or conversation. Returns whether it existed."""


class LocalResponses:
    """Responses in the memory of this process."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    def check_answers(self) -> None:
        """Does nothing: memory always answers."""

    async def begin(self, tenant: str, stored: StoredResponse) -> None:
        """Does nothing: there is no other front."""

    async def add(self, tenant: str, stored: StoredResponse | StoredConversation) -> bool:
        return self.store.add(tenant, stored)

    async def find(
        self, tenant: str, response_id: str, *, to_continue: bool = False
    ) -> StoredResponse | None:
        return self.store.find(tenant, response_id)

    async def find_conversation(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        return self.store.find_conversation(tenant, conversation_id)

    async def find_items(self, tenant: str, item_ids: Iterable[str]) -> Mapping[str, Item]:
        found = {item_id: self.store.find_item(tenant, item_id) for item_id in item_ids}
        return {item_id: item for item_id, item in found.items() if item is not None}

    async def change(self, tenant: str, conversation_id: str, change: Change) -> StoredConversation | None:
        found = self.store.find_conversation(tenant, conversation_id)
        if found is None:
            return None
        changed = change(found)
        if not self.store.add(tenant, changed):
            raise TooLargeToKeep
        return changed

    async def delete(self, tenant: str, stored_id: str) -> bool:
        return self.store.delete(tenant, stored_id)
