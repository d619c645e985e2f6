"""Stored and background responses: reading, streaming, cancelling and deleting them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from agentflow.server.compatible.error_format import read_error
from agentflow.server.errors import ApiError, invalid_field
from agentflow.server.http.call import ApiCall
from agentflow.server.openai.responses.types import (
    DeletedResponse,
    ItemList,
    ItemQuery,
    ResponseFailure,
    ResponseQuery,
)
from agentflow.server.responses.background import BackgroundRun, EventLog
from agentflow.server.responses.item import Item
from agentflow.server.responses.store import StoredResponse

PIECE_WAIT_S = 10.0
"""The longest time for which a server waits for the next event that another server requests."""


async def get_response(call: ApiCall) -> None:
    """Returns a response, or streams its events."""
    query, found = call.read_query(ResponseQuery), await _found(call)
    if not query.stream:
        if query.starting_after is not None:
            raise invalid_field("starting_after", "it needs 'stream' to be true")
        if await _is_answered_elsewhere(call, found):
            return
        await call.reply(found.body)
        return
    start = 0 if query.starting_after is None else query.starting_after + 1
    if isinstance(found, StoredResponse) and found.runs_on is not None:
        await _send_events_from(call, found.runs_on, start)
    elif found.events is None:
        text = "only a background response that was created with 'stream' can be streamed again"
        raise invalid_field("stream", text)
    elif call.forwarded_for is not None:
        piece = await found.events.piece(start, PIECE_WAIT_S)
        await call.reply(msgspec.json.encode(piece))
    else:
        await send_events(call, found.events, start)


async def send_events(call: ApiCall, events: EventLog, start: int = 0) -> None:
    """Streams the events from the number ``start`` on. A client that disconnects ends only the stream."""
    async with call.streaming() as stream:
        async for some in events.since(start):
            await stream.send(some)
        await stream.end()


async def _send_events_from(call: ApiCall, front: str, start: int) -> None:
    """Streams the events of a response that another server runs, which are requested in pieces."""
    first = await _piece_from(call, front, start)
    async with call.streaming() as stream:
        some, number, has_ended = first
        while True:
            await stream.send(some)
            if has_ended:
                break
            some, number, has_ended = await _piece_from(call, front, number)
        await stream.end()


async def _piece_from(call: ApiCall, front: str, start: int) -> tuple[bytes, int, bool]:
    query = "stream=true" if start == 0 else f"stream=true&starting_after={start - 1}"
    answered = await call.asked_elsewhere(front, query.encode())
    if answered.status != 200:
        raise read_error(answered)
    return msgspec.json.decode(answered.body, type=tuple[bytes, int, bool])


async def cancel_response(call: ApiCall) -> None:
    """Cancels a background response. A response that has ended is returned unchanged."""
    found = await _found(call)
    if await _is_answered_elsewhere(call, found):
        return
    if isinstance(found, BackgroundRun):
        await found.cancel()
    elif not found.is_background:
        raise ApiError(400, "invalid_value", "only a background response can be cancelled", "id")
    await call.reply(found.body)


async def delete_response(call: ApiCall) -> None:
    """Deletes a response. A running response is cancelled first."""
    found = await _found(call)
    if await _is_answered_elsewhere(call, found):
        return
    if isinstance(found, BackgroundRun):
        await found.cancel()
    await call.service.responses.delete(call.tenant.name, found.id)
    await call.reply(DeletedResponse(id=found.id))


async def list_input_items(call: ApiCall) -> None:
    """Lists the items of a response's input."""
    await call.reply(make_page((await _found(call)).input_items, call.read_query(ItemQuery)))


def make_page(items: Sequence[Item], query: ItemQuery) -> ItemList:
    """A page of these items, which are in the order of the conversation."""
    ordered = items if query.order == "asc" else items[::-1]
    start = 0
    if query.after is not None:
        start = 1 + next((n for n, item in enumerate(ordered) if item.id == query.after), len(ordered))
        if start > len(ordered):
            raise invalid_field("after", f"there is no item {query.after[:100]!r} here")
    shown = ordered[start : start + query.limit]
    return make_list(shown, has_more=start + len(shown) < len(ordered))


def make_list(items: Sequence[Item], *, has_more: bool) -> ItemList:
    """The items as the API's list. ``has_more``: further items follow."""
    first, last = (items[0].id, items[-1].id) if items else (None, None)
    return ItemList(
        data=[msgspec.Raw(item.shown) for item in items], first_id=first, last_id=last, has_more=has_more
    )


async def _found(call: ApiCall) -> BackgroundRun | StoredResponse:
    response_id = call.path_params["id"]
    run = call.service.background.find(call.tenant.name, response_id)
    return run or await stored_response(call, response_id)


async def _is_answered_elsewhere(call: ApiCall, found: BackgroundRun | StoredResponse) -> bool:
    """Forwards the call if another server runs the response. Returns whether it did."""
    if isinstance(found, BackgroundRun) or found.runs_on is None:
        return False
    await call.relay(found.runs_on)
    return True


async def stored_response(
    call: ApiCall, response_id: str, param: str | None = None, *, to_continue: bool = False
) -> StoredResponse:
    """A response that has ended, or runs on another server (``runs_on``). If that server is gone, the
    response has failed. ``ApiError`` if it is not stored."""
    tenant, responses = call.tenant.name, call.service.responses
    found = await responses.find(tenant, response_id, to_continue=to_continue)
    if found is None:
        text = f"no response {response_id[:100]!r} is stored: it never was, was deleted, or has expired"
        raise ApiError(404, "response_not_found", text, param)
    if found.runs_on is not None and not await call.service.runs_at(found.runs_on):
        found = _lost(found)
        await responses.add(tenant, found)
    return found


def _lost(found: StoredResponse) -> StoredResponse:
    """The failed response of a server that is gone."""
    text = "the server that ran this response is gone: send the request again"
    failure = ResponseFailure(code="server_error", message=text, type="engine_down", param=None)
    answer = msgspec.json.decode(found.body) | {"status": "failed", "error": msgspec.to_builtins(failure)}
    return replace(found, body=msgspec.json.encode(answer), runs_on=None)
