"""Stored and background responses: reading, streaming, cancelling and deleting them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentflow.server.errors import ApiError, invalid_field
from agentflow.server.http.call import ApiCall
from agentflow.server.openai.responses.types import DeletedResponse, ItemList, ItemQuery, ResponseQuery
from agentflow.server.responses.background import BackgroundRun, EventLog
from agentflow.server.responses.item import Item
from agentflow.server.responses.store import StoredResponse


async def get_response(call: ApiCall) -> None:
    """Returns a response, or streams its events from one on."""
    query, found = call.read_query(ResponseQuery), _found(call)
    if not query.stream:
        if query.starting_after is not None:
            raise invalid_field("starting_after", "it needs 'stream' to be true")
        await call.reply(found.body)
        return
    if found.events is None:
        text = "only a background response that was created with 'stream' can be streamed again"
        raise invalid_field("stream", text)
    await send_events(call, found.events, 0 if query.starting_after is None else query.starting_after + 1)


async def send_events(call: ApiCall, events: EventLog, start: int = 0) -> None:
    """Streams the events from the number ``start`` on. A client that disconnects ends only the stream."""
    async with call.streaming() as stream:
        async for some in events.since(start):
            await stream.send(some)
        await stream.end()


async def cancel_response(call: ApiCall) -> None:
    """Cancels a background response. One that has ended is returned unchanged."""
    found = _found(call)
    if isinstance(found, BackgroundRun):
        await found.cancel()
    elif not found.is_background:
        raise ApiError(400, "invalid_value", "only a background response can be cancelled", "id")
    await call.reply(found.body)


async def delete_response(call: ApiCall) -> None:
    """Deletes a response. One that runs is cancelled first."""
    found = _found(call)
    if isinstance(found, BackgroundRun):
        await found.cancel()
    call.service.responses.delete(call.tenant.name, found.id)
    await call.reply(DeletedResponse(id=found.id))


async def list_input_items(call: ApiCall) -> None:
    """Lists the items of a response's input."""
    await call.reply(page_of(_found(call).input_items, call.read_query(ItemQuery)))


def page_of(items: Sequence[Item], query: ItemQuery) -> ItemList:
    """A page of these items, which are in the order of the conversation."""
    ordered = items if query.order == "asc" else items[::-1]
    start = 0
    if query.after is not None:
        start = 1 + next((n for n, item in enumerate(ordered) if item.id == query.after), len(ordered))
        if start > len(ordered):
            raise invalid_field("after", f"there is no item {query.after[:100]!r} here")
    shown = ordered[start : start + query.limit]
    return list_of(shown, has_more=start + len(shown) < len(ordered))


def list_of(items: Sequence[Item], *, has_more: bool) -> ItemList:
    """These items as a list of the API. ``has_more``: further ones follow."""
    first, last = (items[0].id, items[-1].id) if items else (None, None)
    return ItemList(
        data=[msgspec.Raw(item.shown) for item in items], first_id=first, last_id=last, has_more=has_more
    )


def _found(call: ApiCall) -> BackgroundRun | StoredResponse:
    response_id = call.path_params["id"]
    run = call.service.background.find(call.tenant.name, response_id)
    return run or stored_response(call, response_id)


def stored_response(call: ApiCall, response_id: str, param: str | None = None) -> StoredResponse:
    """A response that has ended. ``ApiError`` if it is not stored."""
    found = call.service.responses.find(call.tenant.name, response_id)
    if found is None:
        text = f"no response {response_id[:100]!r} is stored: it was not, was deleted, or has expired"
        raise ApiError(404, "response_not_found", text, param)
    return found
