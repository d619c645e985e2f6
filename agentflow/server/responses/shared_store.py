"""Responses and conversations that several fronts share, in Redis (``stores/entries``).

The messages of a turn are stored as a turn of the entries, so the responses of one conversation share its
history. Conversations have versions: a change that conflicts with another front's is retried. They also have
the ids of their last changes: if an answer of Redis is lost, they show whether the change took effect.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import anyio
import anyio.to_thread
import msgspec

from agentflow.errors import Overloaded
from agentflow.protocol.chat import CalledTool, Message
from agentflow.server.responses.background import EventLog
from agentflow.server.responses.item import Item, Reasoning, item_bytes
from agentflow.server.responses.keeping import Change, TooLargeToKeep
from agentflow.server.responses.store import History, StoredConversation, StoredResponse
from agentflow.server.stores.entries import ENTRY_BYTES, ITEM_BYTES, Chain, SharedEntries, TurnGone

T = TypeVar("T")
ArgT = TypeVar("ArgT")

_INLINE_BYTES: Final = 64 * 1024
"""Larger values are encoded and decoded in a thread."""
_MAX_CHANGES: Final = 50
_KEPT_CHANGES: Final = 16


class _Item(msgspec.Struct, frozen=True, array_like=True):
    id: str
    shown: bytes
    message: Message | None = None
    call: CalledTool | None = None
    reasoning: str | None = None


class _Response(msgspec.Struct, frozen=True, tag="response"):
    id: str
    body: bytes
    input_items: tuple[_Item, ...]
    output_items: tuple[_Item, ...]
    is_background: bool = False
    events: tuple[bytes, ...] | None = None
    runs_on: str | None = None


class _Conversation(msgspec.Struct, frozen=True, tag="conversation"):
    id: str
    created_at: int
    metadata: dict[str, str]
    items: tuple[_Item, ...]
    messages: tuple[Message, ...]
    changes: tuple[bytes, ...] = ()  # the ids of the last ones


_Kept: TypeAlias = _Response | _Conversation
_Turn: TypeAlias = tuple[Message, ...]


class SharedResponses:
    """Responses and conversations in Redis."""

    def __init__(self, entries: SharedEntries) -> None:
        self._entries = entries
        self._threads = anyio.CapacityLimiter(2)

    def check_answers(self) -> None:
        """See ``Responses``."""
        self._entries.store.check_answers()

    async def begin(self, tenant: str, stored: StoredResponse) -> None:
        """See ``Responses``. The response refers to this front."""
        await self._add(tenant, stored, runs_on=self._entries.store.front)

    async def add(self, tenant: str, stored: StoredResponse | StoredConversation) -> bool:
        """See ``Responses``."""
        return bool(await self._add(tenant, stored))

    async def _add(
        self,
        tenant: str,
        stored: StoredResponse | StoredConversation,
        *,
        version: bytes = b"",
        changes: tuple[bytes, ...] = (),
        runs_on: str | None = None,
    ) -> bool | None:
        """Stores a value. False if it is larger than the store, None if the entry has another version."""
        history = stored.history if isinstance(stored, StoredResponse) else None
        data = await self._beside(stored.num_bytes, lambda _: _encoded(stored, runs_on, changes), stored)
        num_bytes = len(data) + ENTRY_BYTES + ITEM_BYTES * len(stored.items)
        if num_bytes + (0 if history is None else history.total_bytes) > self._entries.max_bytes:
            return False
        items = [item.id for item in stored.items]
        while True:
            last = None if history is None else await self._chain(history)
            try:
                return (
                    await self._entries.add(tenant, stored.id, data, items=items, last=last, version=version)
                    or None
                )
            except TurnGone:
                assert history is not None
                history = History(None, history.messages())

    async def _chain(self, history: History) -> Chain:
        if history.shared_id is None:
            history.shared_id = secrets.token_hex(8)
        data = await self._beside(history.num_bytes, msgspec.msgpack.encode, history.own)
        before = "" if history.before is None else history.before.shared_id or ""
        return Chain(history.shared_id, data, before)

    async def find(
        self, tenant: str, response_id: str, *, to_continue: bool = False
    ) -> StoredResponse | None:
        """See ``Responses``."""
        found = await self._find(tenant, response_id, to_continue=to_continue)
        if found is None:
            return None
        kept, _, turns = found
        if not isinstance(kept, _Response):
            return None
        history: History | None = None
        for turn_id, data in turns:
            own = await self._decoded(self._entries.key("turn", tenant, turn_id), data, _Turn)
            if own is None:
                return None
            history = History(history, own)
            history.shared_id = turn_id
        return _response(kept, history)

    async def find_conversation(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        """See ``Responses``."""
        found = await self._find_conversation(tenant, conversation_id)
        return None if found is None else _conversation(found[0])

    async def _find_conversation(
        self, tenant: str, conversation_id: str
    ) -> tuple[_Conversation, bytes] | None:
        """The conversation and its version."""
        found = await self._find(tenant, conversation_id)
        if found is None or not isinstance(found[0], _Conversation):
            return None
        return found[0], found[1]

    async def find_items(self, tenant: str, item_ids: Iterable[str]) -> Mapping[str, Item]:
        """See ``Responses``. Reads each response or conversation once."""
        items: dict[str, Item] = {}
        wanted = dict.fromkeys(item_ids)
        for item_id in wanted:
            if item_id in items:
                continue
            for container in await self._entries.with_item(tenant, item_id):
                found = await self._find(tenant, container)
                if found is not None:
                    kept = found[0]
                    parts = (
                        kept.items
                        if isinstance(kept, _Conversation)
                        else kept.input_items + kept.output_items
                    )
                    items |= {part.id: _item(part) for part in parts if part.id in wanted}
                    break
        return items

    async def change(self, tenant: str, conversation_id: str, change: Change) -> StoredConversation | None:
        """See ``Responses``. ``Overloaded`` if conflicting changes always came first, or the store does not
        answer."""
        own, is_repeated = secrets.token_bytes(8), False
        for _ in range(_MAX_CHANGES):
            found = await self._find_conversation(tenant, conversation_id)
            if found is None:
                return None
            kept, version = found
            if own in kept.changes:  # it was stored, and the answer was lost
                return _conversation(kept)
            changed = change(_conversation(kept))
            changes = (*kept.changes, own)[-_KEPT_CHANGES:]
            try:
                was_stored = await self._add(tenant, changed, version=version, changes=changes)
            except Overloaded:  # the client repeats its request, even if the change took effect
                if is_repeated:
                    raise
                is_repeated = True
                continue
            if was_stored is False:
                raise TooLargeToKeep
            if was_stored:
                return changed
        raise Overloaded("this conversation changes too often: try again in a moment")

    async def delete(self, tenant: str, stored_id: str) -> bool:
        """See ``Responses``."""
        return await self._entries.delete(tenant, stored_id)

    async def _find(
        self, tenant: str, stored_id: str, *, to_continue: bool = False
    ) -> tuple[_Kept, bytes, list[tuple[str, bytes]]] | None:
        """The value, its version, and the turns of its history."""
        found = await self._entries.find(tenant, stored_id, with_turns=to_continue)
        if found is None:
            return None
        key = self._entries.key("kept", tenant, stored_id)
        kept: _Kept | None = await self._decoded(key, found.data, _Kept)
        return None if kept is None else (kept, found.version, found.turns)

    async def _decoded(self, key: str, data: bytes, kind: Any) -> Any:
        return await self._beside(len(data), partial(self._entries.store.decoded, key, kind=kind), data)

    async def _beside(self, num_bytes: int, function: Callable[[ArgT], T], argument: ArgT) -> T:
        """Calls the function with the argument of ``num_bytes`` bytes; in a thread if it is large."""
        if num_bytes <= _INLINE_BYTES:
            return function(argument)
        return await anyio.to_thread.run_sync(function, argument, limiter=self._threads)


def _encoded(
    stored: StoredResponse | StoredConversation, runs_on: str | None, changes: tuple[bytes, ...]
) -> bytes:
    if isinstance(stored, StoredConversation):
        items = tuple(map(_kept_item, stored.items))
        return msgspec.msgpack.encode(
            _Conversation(stored.id, stored.created_at, stored.metadata, items, stored.messages, changes)
        )
    return msgspec.msgpack.encode(
        _Response(
            stored.id,
            stored.body,
            tuple(map(_kept_item, stored.input_items)),
            tuple(map(_kept_item, stored.output_items)),
            stored.is_background,
            None if stored.events is None else stored.events.all(),
            runs_on,
        )
    )


def _response(kept: _Response, history: History | None) -> StoredResponse:
    events = None if kept.events is None else EventLog.ended(kept.events)
    return StoredResponse(
        kept.id,
        kept.body,
        history,
        tuple(map(_item, kept.input_items)),
        tuple(map(_item, kept.output_items)),
        kept.is_background,
        events,
        kept.runs_on,
    )


def _conversation(kept: _Conversation) -> StoredConversation:
    items = tuple(map(_item, kept.items))
    num_bytes = sum([item.num_bytes for item in items])
    return StoredConversation(kept.id, kept.created_at, kept.metadata, items, kept.messages, num_bytes)


def _kept_item(item: Item) -> _Item:
    match item.step:
        case Message():
            return _Item(item.id, item.shown, message=item.step)
        case CalledTool():
            return _Item(item.id, item.shown, call=item.step)
        case Reasoning(text):
            return _Item(item.id, item.shown, reasoning=text)


def _item(kept: _Item) -> Item:
    step = kept.message or kept.call or Reasoning(kept.reasoning or "")
    return Item(kept.id, kept.shown, step, item_bytes(kept.id, kept.shown, step))
