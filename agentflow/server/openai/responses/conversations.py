"""Conversation objects: ``/v1/conversations``, and the turns that responses append to them.

A conversation is in the store of responses. It changes as a whole: a turn, new items or a deletion replace it
by the next version. Its messages are kept along with its items, so that a turn reads only new items.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from agentflow.protocol.chat import Message
from agentflow.protocol.events import Capabilities
from agentflow.server.compatible.fields import Unread, is_given
from agentflow.server.errors import ApiError, invalid_field
from agentflow.server.http.call import ApiCall, decoded
from agentflow.server.openai.responses.items import ItemReader, Turns
from agentflow.server.openai.responses.stored import list_of, page_of
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
from agentflow.server.responses.store import ResponseStore, StoredConversation

logger = logging.getLogger(__name__)

# Of items that are given before a model is chosen. A response checks whether its model accepts the images.
_NO_MODEL = Capabilities("a conversation", images=True)


async def create_conversation(call: ApiCall) -> None:
    """Creates a conversation."""
    body = await call.beside(call.read, ConversationRequest)
    with call.service.models.gate.request(call.tenant, 0):
        items = await call.beside(_read, call, body.items or ())
        made = StoredConversation(f"conv_{secrets.token_hex(24)}", int(time.time()), body.metadata or {})
        made = _grown(made, items, "items")
        _keep(call, made)
    await call.reply(_answer(made))


async def get_conversation(call: ApiCall) -> None:
    """Returns a conversation."""
    await call.reply(_answer(_found(call)))


async def update_conversation(call: ApiCall) -> None:
    """Replaces the metadata of a conversation."""
    body, found = call.read(ConversationUpdateRequest), _found(call)
    with call.service.models.gate.request(call.tenant, 0):
        changed = replace(found, metadata=body.metadata or {})
        _keep(call, changed)
    await call.reply(_answer(changed))


async def delete_conversation(call: ApiCall) -> None:
    """Deletes a conversation. The responses of its turns are kept."""
    found = _found(call)
    call.service.responses.delete(call.tenant.name, found.id)
    await call.reply(DeletedConversation(id=found.id))


async def list_items(call: ApiCall) -> None:
    """Lists the items of a conversation."""
    await call.reply(page_of(_found(call).items, call.read_query(ItemQuery)))


async def create_items(call: ApiCall) -> None:
    """Appends items to a conversation."""
    body = await call.beside(call.read, ConversationItemsRequest)
    with call.service.models.gate.request(call.tenant, 0):
        items = await call.beside(_read, call, body.items)
        found = _found(call)
        check_room(len(found.items) + len(items), "items")
        _keep(call, _grown(found, items, "items"))
    await call.reply(list_of(items, has_more=False))


async def get_item(call: ApiCall) -> None:
    """Returns an item of a conversation."""
    await call.reply(_found(call).items[_place_of(call)].shown)


async def delete_item(call: ApiCall) -> None:
    """Deletes an item of a conversation, unless a later one needs it."""
    found, place = _found(call), _place_of(call)
    items = (*found.items[:place], *found.items[place + 1 :])
    empty = replace(found, items=(), messages=(), item_bytes=0)
    try:
        changed = _grown(empty, items, "items")
    except ApiError as error:
        raise invalid_field("item_id", f"a later item needs this one: {error.message}") from None
    _keep(call, changed)
    await call.reply(_answer(changed))


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that has ended. ``answer``: the message of the model, of which ``output`` are the items."""

    given: Sequence[Item]
    output: Sequence[Item]
    answer: Message


def conversation_of(call: ApiCall, given: Unread) -> StoredConversation | None:
    """The conversation that a request names by its id or by an object, if it names one."""
    if not is_given(given):
        return None
    assert given is not None
    is_text = bytes(memoryview(given)[:1]) == b'"'
    if is_text:
        return _conversation(call, decoded(given, str, "conversation"), "conversation")
    return _conversation(call, decoded(given, ConversationId, "conversation").id, "conversation")


def append_turn(responses: ResponseStore, tenant: str, conversation_id: str, turn: Turn) -> None:
    """Appends a turn to the stored conversation, unless it was deleted in the meantime."""
    found = responses.find_conversation(tenant, conversation_id)
    if found is None:
        return
    try:
        changed = _grown(found, turn.given, "input")
    except ApiError as error:  # an item that it needs was deleted
        logger.warning("a turn is not appended to the conversation %s: %s", found.id, error.message)
        return
    changed = replace(
        changed,
        items=(*changed.items, *turn.output),
        messages=(*changed.messages, turn.answer),
        item_bytes=changed.item_bytes + sum([item.num_bytes for item in turn.output]),
    )
    if not responses.add(tenant, changed):
        logger.warning("a turn is not appended to the conversation %s: it would be too large", found.id)


def check_room(num_items: int, param: str) -> None:
    """``ApiError`` if a conversation may not have this many items."""
    if num_items > MAX_ITEMS:
        text = f"the conversation would have {num_items:,} items; the limit is {MAX_ITEMS:,}"
        raise invalid_field(param, text)


def _read(call: ApiCall, given: Sequence[msgspec.Raw]) -> list[Item]:
    """The items of a request."""
    reader = ItemReader(_NO_MODEL, partial(call.service.responses.find_item, call.tenant.name))
    return [reader.read(raw, f"items[{number}]") for number, raw in enumerate(given)]


def _grown(conversation: StoredConversation, items: Sequence[Item], field: str) -> StoredConversation:
    """The conversation with these items at its end. ``ApiError`` for one that does not fit there. ``field``:
    the request's."""
    turns = Turns(conversation.messages)
    for number, item in enumerate(items):
        turns.add(item, f"{field}[{number}]")
    return replace(
        conversation,
        items=(*conversation.items, *items),
        messages=tuple(turns.messages),
        item_bytes=conversation.item_bytes + sum([item.num_bytes for item in items]),
    )


def _keep(call: ApiCall, conversation: StoredConversation) -> None:
    if not call.service.responses.add(call.tenant.name, conversation):
        raise invalid_field("items", "the conversation is larger than the server's memory for all of them")


def _found(call: ApiCall) -> StoredConversation:
    return _conversation(call, call.path_params["id"])


def _conversation(call: ApiCall, conversation_id: str, param: str | None = None) -> StoredConversation:
    found = call.service.responses.find_conversation(call.tenant.name, conversation_id)
    if found is None:
        text = f"there is no conversation {conversation_id[:100]!r}: it was deleted, or has expired"
        raise ApiError(404, "conversation_not_found", text, param)
    return found


def _place_of(call: ApiCall) -> int:
    """Where the item that the path names is in its conversation."""
    item_id = call.path_params["item_id"]
    for place, item in enumerate(_found(call).items):
        if item.id == item_id:
            return place
    raise ApiError(404, "item_not_found", f"the conversation has no item {item_id[:100]!r}")


def _answer(conversation: StoredConversation) -> ConversationAnswer:
    return ConversationAnswer(
        id=conversation.id, created_at=conversation.created_at, metadata=conversation.metadata
    )
