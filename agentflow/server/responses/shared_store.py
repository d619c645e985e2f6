"""Responses and conversations that several fronts share, in Redis.

As in the process (``store``), each tenant's are bounded together with all others' in bytes, the oldest of the
tenant with the most are dropped first, and each is dropped when it has expired. Bytes are those of the values
in Redis, with an estimate of its tables. A history is a chain of *turns*, which the responses of one
conversation share: each turn counts the responses and turns that refer to it, and goes with the last.

A change of several keys is one script, so it happens as a whole. Conversations have versions: a change that
meets another front's is made again. Scripts form the names of keys, so Redis Cluster is not supported.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import quote

import anyio
import anyio.to_thread
import msgspec

from agentflow.errors import Overloaded
from agentflow.protocol.chat import CalledTool, Message
from agentflow.server.responses.background import EventLog
from agentflow.server.responses.item import Item, Reasoning, item_bytes
from agentflow.server.responses.keeping import Change, TooLargeToKeep
from agentflow.server.responses.store import History, StoredConversation, StoredResponse
from agentflow.server.stores.shared import SharedStore

T = TypeVar("T")
ArgT = TypeVar("ArgT")

_ENTRY_BYTES: Final = 700
"""The tables of Redis for a response, a conversation or a turn."""
_INDEX_BYTES: Final = 250
"""The tables of Redis for an item."""
_INLINE_BYTES: Final = 64 * 1024
"""Larger values are encoded and decoded in a thread."""
_MAX_CHANGES: Final = 50
_SWEEP_S: Final = 60.0

_COMMON: Final = """
local P = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function record(t, id) return P .. 'kept:' .. t .. ':' .. id end
local function turn(t, id) return P .. 'turn:' .. t .. ':' .. id end
local function item(t, id) return P .. 'item:' .. t .. ':' .. id end
local function order(t) return P .. 'kept-order:' .. t end
local BYTES = P .. 'kept-bytes'
local function count(t, n)
  if redis.call('HINCRBY', BYTES, t, n) <= 0 then redis.call('HDEL', BYTES, t) end
end
local function release(t, id)
  while id and id ~= '' do
    local key = turn(t, id)
    if redis.call('EXISTS', key) == 0 or redis.call('HINCRBY', key, 'refs', -1) > 0 then return end
    local got = redis.call('HMGET', key, 'before', 'n')
    redis.call('UNLINK', key)
    count(t, -(tonumber(got[2]) or 0))
    id = got[1]
  end
end
local function remove(t, id)
  local key = record(t, id)
  local got = redis.call('HMGET', key, 'n', 'turn', 'items')
  redis.call('ZREM', order(t), id)
  if not got[1] then return 0 end
  redis.call('UNLINK', key)
  count(t, -tonumber(got[1]))
  for _, one in ipairs(cmsgpack.unpack(got[3])) do redis.call('SREM', item(t, one), id) end
  release(t, got[2])
  return 1
end
local function sweep()
  local tenants = redis.call('HKEYS', BYTES)
  for _, t in ipairs(tenants) do
    local expired = redis.call('ZRANGEBYSCORE', order(t), '-inf', now, 'LIMIT', 0, 500)
    for _, id in ipairs(expired) do remove(t, id) end
  end
end
"""

# Returns 1; 0 if the version is another one, and -1 if the turn before is gone.
_ADD: Final = (
    _COMMON
    + """
local t, id, data, n, life = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local most, items = tonumber(ARGV[6]), ARGV[7]
local new, new_data, new_n, before, version = ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12]
sweep()
local key = record(t, id)
if version ~= '' and redis.call('HGET', key, 'version') ~= version then return 0 end
if new ~= '' then
  if redis.call('EXISTS', turn(t, new)) == 0 then
    if before ~= '' then
      if redis.call('EXISTS', turn(t, before)) == 0 then return -1 end
      redis.call('HINCRBY', turn(t, before), 'refs', 1)
    end
    redis.call('HSET', turn(t, new), 'data', new_data, 'before', before, 'n', new_n, 'refs', 0)
    count(t, new_n)
  end
  redis.call('HINCRBY', turn(t, new), 'refs', 1)
end
remove(t, id)
redis.call('HSET', key, 'data', data, 'n', n, 'turn', new, 'items', items, 'until', now + life,
           'version', redis.call('INCR', P .. 'kept-version'))
redis.call('ZADD', order(t), now + life, id)
count(t, n)
for _, one in ipairs(cmsgpack.unpack(items)) do redis.call('SADD', item(t, one), id) end
local sizes, total, flat = {}, 0, redis.call('HGETALL', BYTES)
for i = 1, #flat, 2 do
  sizes[flat[i]] = tonumber(flat[i + 1])
  total = total + sizes[flat[i]]
end
for _ = 1, 2000 do
  if total <= most then break end
  local largest
  for name, size in pairs(sizes) do
    local is_same = largest and size == sizes[largest]
    if not largest or size > sizes[largest] or (is_same and name < largest) then largest = name end
  end
  if not largest then break end
  local oldest = redis.call('ZRANGE', order(largest), 0, 0)[1]
  if not oldest or (largest == t and oldest == id) then
    sizes[largest] = nil
  else
    remove(largest, oldest)
    local left = tonumber(redis.call('HGET', BYTES, largest) or '0')
    total = total - sizes[largest] + left
    sizes[largest] = left
  end
end
return 1
"""
)
# Returns nothing, or the data, the version, and the turns of its history, the last one first.
_FIND: Final = (
    _COMMON
    + """
local got = redis.call('HMGET', record(ARGV[1], ARGV[2]), 'data', 'version', 'until', 'turn')
if not got[1] or (tonumber(got[3]) or 0) <= now then return nil end
local found, id = {got[1], got[2]}, got[4]
while ARGV[3] == '1' and id and id ~= '' do
  local one = redis.call('HMGET', turn(ARGV[1], id), 'data', 'before')
  if not one[1] then return nil end
  found[#found + 1] = id
  found[#found + 1] = one[1]
  id = one[2]
end
return found
"""
)
_DELETE: Final = _COMMON + "sweep() return remove(ARGV[1], ARGV[2])"
_SWEEP: Final = _COMMON + "sweep() return 0"


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


_Kept: TypeAlias = _Response | _Conversation
_Turn: TypeAlias = tuple[Message, ...]


class SharedResponses:
    """``max_bytes`` and ``lifetime_s``: as of ``ResponseStore``; those of all fronts should be equal."""

    def __init__(self, store: SharedStore, max_bytes: int, lifetime_s: float) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._life_ms = max(1, round(lifetime_s * 1_000))
        self._threads = anyio.CapacityLimiter(2)

    def check_answers(self) -> None:
        """As in ``Responses``."""
        self._store.check_answers()

    async def sweep(self) -> None:
        """Drops what has expired, from time to time, until it is cancelled."""
        while True:
            with suppress(Overloaded):  # it is swept when the store answers again
                await self._run(_SWEEP)
            await anyio.sleep(_SWEEP_S)  # noqa: TID251 - the time is the purpose

    async def begin(self, tenant: str, stored: StoredResponse) -> None:
        """As in ``Responses``. The front of the store runs it."""
        await self._add(tenant, stored, runs_on=self._store.front)

    async def add(self, tenant: str, stored: StoredResponse | StoredConversation) -> bool:
        """As in ``Responses``."""
        return bool(await self._add(tenant, stored))

    async def _add(
        self,
        tenant: str,
        stored: StoredResponse | StoredConversation,
        *,
        version: bytes = b"",
        runs_on: str | None = None,
    ) -> bool | None:
        """Whether it was stored; None if the version is another one."""
        history = stored.history if isinstance(stored, StoredResponse) else None
        data = await self._beside(stored.num_bytes, lambda _: _encoded(stored, runs_on), stored)
        num_bytes = len(data) + _ENTRY_BYTES + _INDEX_BYTES * len(stored.items)
        if num_bytes + (0 if history is None else history.total_bytes) > self._max_bytes:
            return False
        head: list[str | bytes | int] = [stored.id, data, num_bytes, self._life_ms, self._max_bytes]
        items = msgspec.msgpack.encode([*dict.fromkeys(item.id for item in stored.items)])
        while True:
            turn = await self._turn(history)
            result = int(await self._run(_ADD, quote(tenant, safe=""), *head, items, *turn, version))
            if result >= 0:
                return bool(result) or None
            assert history is not None  # a turn before it was dropped while this one ran
            history = History(None, history.messages())

    async def _turn(self, history: History | None) -> list[str | bytes | int]:
        """The id of the last turn of a history, its data and size, and the id of the turn before it."""
        if history is None:
            return ["", b"", 0, ""]
        if history.shared_id is None:
            history.shared_id = secrets.token_hex(8)
        data = await self._beside(history.num_bytes, msgspec.msgpack.encode, history.own)
        before = "" if history.before is None else history.before.shared_id or ""
        return [history.shared_id, data, len(data) + _ENTRY_BYTES, before]

    async def find(
        self, tenant: str, response_id: str, *, to_continue: bool = False
    ) -> StoredResponse | None:
        """As in ``Responses``."""
        found = await self._find(tenant, response_id, to_continue=to_continue)
        if found is None:
            return None
        kept, _, turns = found
        if not isinstance(kept, _Response):
            return None
        history: History | None = None
        for turn_id, data in turns:
            own = await self._decoded(self._store.key("turn", tenant, turn_id), data, _Turn)
            if own is None:
                return None
            history = History(history, own)
            history.shared_id = turn_id
        return _response(kept, history)

    async def find_conversation(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        """As in ``Responses``."""
        found = await self._find_conversation(tenant, conversation_id)
        return None if found is None else found[0]

    async def _find_conversation(
        self, tenant: str, conversation_id: str
    ) -> tuple[StoredConversation, bytes] | None:
        """The conversation and its version."""
        found = await self._find(tenant, conversation_id)
        if found is None or not isinstance(found[0], _Conversation):
            return None
        return _conversation(found[0]), found[1]

    async def find_items(self, tenant: str, item_ids: Iterable[str]) -> Mapping[str, Item]:
        """As in ``Responses``. Reads each response or conversation once."""
        items: dict[str, Item] = {}
        for item_id in item_ids:
            if item_id in items:
                continue
            key = self._store.key("item", tenant, item_id)
            for container in await self._members(key):
                found = await self._find(tenant, container.decode(errors="replace"))
                if found is not None:
                    kept = found[0]
                    parts = (
                        kept.items
                        if isinstance(kept, _Conversation)
                        else kept.input_items + kept.output_items
                    )
                    items |= {part.id: _item(part) for part in parts}
                    break
        return items

    async def _members(self, key: str) -> set[bytes]:
        members: set[bytes] = await self._store.call(lambda client: client.smembers(key))
        return members

    async def change(self, tenant: str, conversation_id: str, change: Change) -> StoredConversation | None:
        """As in ``Responses``. ``Overloaded`` if other changes always came first."""
        for _ in range(_MAX_CHANGES):
            found = await self._find_conversation(tenant, conversation_id)
            if found is None:
                return None
            changed = change(found[0])
            was_stored = await self._add(tenant, changed, version=found[1])
            if was_stored is False:
                raise TooLargeToKeep
            if was_stored:
                return changed
        raise Overloaded("this conversation changes too often: try again in a moment")

    async def delete(self, tenant: str, stored_id: str) -> bool:
        """As in ``Responses``."""
        return bool(await self._run(_DELETE, quote(tenant, safe=""), stored_id))

    async def _run(self, script: str, *arguments: str | bytes | int) -> Any:
        return await self._store.run(script, [self._store.prefix], [*arguments])

    async def _find(
        self, tenant: str, stored_id: str, *, to_continue: bool = False
    ) -> tuple[_Kept, bytes, list[tuple[str, bytes]]] | None:
        """The value, its version, and the turns of its history, the first one first."""
        found = await self._run(_FIND, quote(tenant, safe=""), stored_id, "1" if to_continue else "0")
        if not found:
            return None
        kept: _Kept | None = await self._decoded(self._store.key("kept", tenant, stored_id), found[0], _Kept)
        if kept is None:
            return None
        turns = [(found[n].decode(), found[n + 1]) for n in range(2, len(found), 2)]
        return kept, found[1], turns[::-1]

    async def _decoded(self, key: str, data: bytes, kind: Any) -> Any:
        return await self._beside(len(data), partial(self._store.decoded, key, kind=kind), data)

    async def _beside(self, num_bytes: int, function: Callable[[ArgT], T], argument: ArgT) -> T:
        """Calls the function, in a thread if it works on this many bytes."""
        if num_bytes <= _INLINE_BYTES:
            return function(argument)
        return await anyio.to_thread.run_sync(function, argument, limiter=self._threads)


def _encoded(stored: StoredResponse | StoredConversation, runs_on: str | None) -> bytes:
    if isinstance(stored, StoredConversation):
        items = tuple(map(_kept_item, stored.items))
        return msgspec.msgpack.encode(
            _Conversation(stored.id, stored.created_at, stored.metadata, items, stored.messages)
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
