"""Conversation objects: ``/v1/conversations``, and the turns that responses append to them.

A conversation is in the store of responses. A turn, new items or a deletion replace it with a new version.
Its messages are stored along with its items, so that a turn parses only new items.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import msgspec

from agentflow.protocol.chat import Message
from agentflow.protocol.events import Capabilities
from agentflow.server.compatible.fields import Unread, is_given
from agentflow.server.errors import ApiError, invalid_field
from agentflow.server.http.call import ApiCall
from agentflow.server.http.json_body import decoded
from agentflow.server.openai.responses.items import ItemReader, Turns, references_in
from agentflow.server.openai.responses.stored import make_list, make_page
from agentflow.server.openai.responses.types import (
    MAX_ITEMS,
    ConversationAnswer,
    ConversationId,
    ConversationItemsRequest,
    ConversationRequest,
    ConversationUpdateRequest,
    DeletedConversation,
    ItemQuery,
)
from agentflow.server.responses.item import Item
from agentflow.server.responses.keeping import Change, Responses, TooLargeToKeep
from agentflow.server.responses.store import StoredConversation

logger = logging.getLogger(__name__)

# Stands for the model while items are read before a model is chosen. A response checks whether its model
# accepts the images.
_NO_MODEL = Capabilities("a conversation", images=True, videos=True)


async def create_conversation(call: ApiCall) -> None:
    """Creates a conversation."""
    body = await call.process(call.read, ConversationRequest)
    async with _metered(call):
        items = await _read(call, body.items or ())
        made = StoredConversation(f"conv_{secrets.token_hex(24)}", int(time.time()), body.metadata or {})
        made = _grown(made, items, "items")
        if not await call.service.responses.add(call.tenant.name, made):
            raise _too_large()
    await call.reply(_answer(made))


async def get_conversation(call: ApiCall) -> None:
    """Returns a conversation."""
    await call.reply(_answer(await _found(call)))


async def update_conversation(call: ApiCall) -> None:
    """Replaces the metadata of a conversation."""
    body = await call.process(call.read, ConversationUpdateRequest)
    await _found(call)
    async with _metered(call):
        changed = await _changed(call, lambda found: replace(found, metadata=body.metadata or {}))
    await call.reply(_answer(changed))


async def delete_conversation(call: ApiCall) -> None:
    """Deletes a conversation. The responses of its turns are kept."""
    found = await _found(call)
    await call.service.responses.delete(call.tenant.name, found.id)
    await call.reply(DeletedConversation(id=found.id))


async def list_items(call: ApiCall) -> None:
    """Lists the items of a conversation."""
    await call.reply(make_page((await _found(call)).items, call.read_query(ItemQuery)))


async def create_items(call: ApiCall) -> None:
    """Appends items to a conversation."""
    body = await call.process(call.read, ConversationItemsRequest)
    async with _metered(call):
        items = await _read(call, body.items)

        def append(found: StoredConversation) -> StoredConversation:
            check_room(len(found.items) + len(items), "items")
            return _grown(found, items, "items")

        await _changed(call, append)
    await call.reply(make_list(items, has_more=False))


async def get_item(call: ApiCall) -> None:
    """Returns an item of a conversation."""
    found = await _found(call)
    await call.reply(found.items[_find_index(call, found)].shown)


async def delete_item(call: ApiCall) -> None:
    """Deletes an item of a conversation, unless a later one needs it."""

    def drop(found: StoredConversation) -> StoredConversation:
        index = _find_index(call, found)
        items = (*found.items[:index], *found.items[index + 1 :])
        empty = replace(found, items=(), messages=(), item_bytes=0)
        try:
            return _grown(empty, items, "items")
        except ApiError as error:
            raise invalid_field("item_id", f"a later item needs this one: {error.message}") from None

    await call.reply(_answer(await _changed(call, drop)))


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn that has ended. ``given``: its input items. ``output``: the items of ``answer``, the model's
    message."""

    given: Sequence[Item]
    output: Sequence[Item]
    answer: Message


async def load_conversation(call: ApiCall, given: Unread) -> StoredConversation | None:
    """The conversation that a request continues, if it has the id of one, as text or in an object."""
    if not is_given(given):
        return None
    assert given is not None
    is_text = bytes(memoryview(given)[:1]) == b'"'
    if is_text:
        return await _conversation(call, decoded(given, str, "conversation"), "conversation")
    return await _conversation(call, decoded(given, ConversationId, "conversation").id, "conversation")


async def append_turn(responses: Responses, tenant: str, conversation_id: str, turn: EndedTurn) -> None:
    """Appends a turn to the stored conversation, unless it was deleted in the meantime."""

    def append(found: StoredConversation) -> StoredConversation:
        changed = _grown(found, turn.given, "input")
        return replace(
            changed,
            items=(*changed.items, *turn.output),
            messages=(*changed.messages, turn.answer),
            item_bytes=changed.item_bytes + sum([item.num_bytes for item in turn.output]),
        )

    try:
        await responses.change(tenant, conversation_id, append)
    except ApiError as error:  # an item that the turn needs was deleted
        logger.warning("a turn is not appended to the conversation %s: %s", conversation_id, error.message)
    except TooLargeToKeep:
        logger.warning(
            "a turn is not appended to the conversation %s: it would be too large", conversation_id
        )


def check_room(num_items: int, param: str) -> None:
    """``ApiError`` if a conversation may not have this many items."""
    if num_items > MAX_ITEMS:
        text = f"the conversation would have {num_items:,} items; the limit is {MAX_ITEMS:,}"
        raise invalid_field(param, text)


@asynccontextmanager
async def _metered(call: ApiCall) -> AsyncIterator[None]:
    """The scope of work that counts as a request of the tenant."""
    gate = call.service.models.gate
    if (leasing := gate.ready(call.tenant)) is not None:
        await leasing
    with gate.request(call.tenant, 0):
        yield


async def _read(call: ApiCall, given: Sequence[msgspec.Raw]) -> list[Item]:
    """The items of a request."""
    references = await call.process(_references, given)
    items = await call.service.responses.find_items(call.tenant.name, references) if references else {}
    reader = ItemReader(_NO_MODEL, items.get)

    def read() -> list[Item]:
        return [reader.read(raw, f"items[{number}]") for number, raw in enumerate(given)]

    return await call.process(read)


def _references(given: Sequence[msgspec.Raw]) -> list[str]:
    return [
        item_id for raw in given for item_id in references_in(msgspec.Raw(b"[%b]" % bytes(memoryview(raw))))
    ]


def _grown(conversation: StoredConversation, items: Sequence[Item], field: str) -> StoredConversation:
    """Appends items to a conversation. ``ApiError`` for an item that cannot follow. ``field``: the request's
    field of the items."""
    turns = Turns(conversation.messages)
    for number, item in enumerate(items):
        turns.add(item, f"{field}[{number}]")
    return replace(
        conversation,
        items=(*conversation.items, *items),
        messages=tuple(turns.messages),
        item_bytes=conversation.item_bytes + sum([item.num_bytes for item in items]),
    )


async def _changed(call: ApiCall, change: Change) -> StoredConversation:
    """Changes the conversation in the path. ``ApiError`` if it does not exist, or would be too large."""
    conversation_id = call.path_params["id"]
    try:
        changed = await call.service.responses.change(call.tenant.name, conversation_id, change)
    except TooLargeToKeep:
        raise _too_large() from None
    if changed is None:
        raise _not_found(conversation_id)
    return changed


def _too_large() -> ApiError:
    return invalid_field("items", "the conversation is larger than the server's memory for conversations")


async def _found(call: ApiCall) -> StoredConversation:
    return await _conversation(call, call.path_params["id"])


async def _conversation(call: ApiCall, conversation_id: str, param: str | None = None) -> StoredConversation:
    found = await call.service.responses.find_conversation(call.tenant.name, conversation_id)
    if found is None:
        raise _not_found(conversation_id, param)
    return found


def _not_found(conversation_id: str, param: str | None = None) -> ApiError:
    text = f"there is no conversation {conversation_id[:100]!r}: it was deleted, or has expired"
    return ApiError(404, "conversation_not_found", text, param)


def _find_index(call: ApiCall, found: StoredConversation) -> int:
    """The index of the item in the path in its conversation."""
    item_id = call.path_params["item_id"]
    for index, item in enumerate(found.items):
        if item.id == item_id:
            return index
    raise ApiError(404, "item_not_found", f"the conversation has no item {item_id[:100]!r}")


def _answer(conversation: StoredConversation) -> ConversationAnswer:
    return ConversationAnswer(
        id=conversation.id, created_at=conversation.created_at, metadata=conversation.metadata
    )
