"""Entries of tenants in Redis, with a limit on their total size and on the lifetime of each.

When the entries of all tenants exceed the limit of bytes, the oldest entries of the tenant with the most are
dropped. An entry is also dropped when it has expired. Bytes are the sizes of the values, with an estimate of
the overhead of Redis. Entries may share *turns*: a turn refers to the turn before it, counts the entries and
turns that refer to it, and is removed with the last of them. An index finds entries by the ids of items.

A change of several keys is one script, so it is atomic. Redis serves no other client while a script runs, so
one run removes at most 2,000 entries. Scripts form the names of keys, so Redis Cluster is not supported.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import anyio
import msgspec

from agentflow.errors import Overloaded
from agentflow.server.stores.shared import SharedStore

ENTRY_BYTES: Final = 600
"""The estimated overhead of Redis for an entry or a turn."""
ITEM_BYTES: Final = 250
"""The estimated overhead of Redis for an item in the index."""
_SWEEP_S: Final = 60.0

_COMMON: Final = """
local P = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function record(t, id) return P .. 'kept:' .. t .. ':' .. id end
local function turn(t, id) return P .. 'turn:' .. t .. ':' .. id end
local function item(t, id) return P .. 'item:' .. t .. ':' .. id end
local function order(t) return P .. 'kept-order:' .. t end
local SIZES, TOTAL = P .. 'kept-sizes', P .. 'kept-total'
local function count(t, n)
  local left = tonumber(redis.call('ZINCRBY', SIZES, n, t))
  redis.call('INCRBY', TOTAL, n)
  if left <= 0 then
    redis.call('ZREM', SIZES, t)
    redis.call('DECRBY', TOTAL, string.format('%d', left))
  end
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
  local left = 500
  for _, t in ipairs(redis.call('ZRANGE', SIZES, 0, -1)) do
    local expired = redis.call('ZRANGEBYSCORE', order(t), '-inf', now, 'LIMIT', 0, left)
    for _, id in ipairs(expired) do remove(t, id) end
    left = left - #expired
    if left <= 0 then return 1 end
  end
  return 0
end
"""

# Returns 1; 0 if the entry has another version; -1 if the turn before does not exist.
_ADD: Final = (
    _COMMON
    + """
local t, id, data, n, life = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local most, items = tonumber(ARGV[6]), ARGV[7]
local new, new_data, new_n, before, version = ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12]
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
local at = 0
for _ = 1, 2000 do
  if tonumber(redis.call('GET', TOTAL)) <= most then break end
  local largest = redis.call('ZREVRANGE', SIZES, at, at)[1]
  if not largest then break end
  local oldest = redis.call('ZRANGE', order(largest), 0, 0)[1]
  if not oldest or (largest == t and oldest == id) then
    at = at + 1
  else
    remove(largest, oldest)
  end
end
return 1
"""
)
# Returns nothing, or the data, the version, and the ids and data of the turns, the last turn first.
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
_DELETE: Final = _COMMON + "return remove(ARGV[1], ARGV[2])"
# Returns 1 if more entries may have expired: one run removes a limited number.
_SWEEP: Final = _COMMON + "return sweep()"


class Chain(NamedTuple):
    """The last turn of an entry. ``before``: the id of the turn before it; empty for the first turn."""

    id: str
    data: bytes
    before: str = ""


class Found(NamedTuple):
    """An entry. ``turns``: the ids and values of its turns, the first one first."""

    data: bytes
    version: bytes
    turns: list[tuple[str, bytes]]


class TurnGone(Exception):
    """The turn before a new turn is no longer in the store."""


class SharedEntries:
    """Entries in Redis. All operations raise ``Overloaded`` if Redis does not answer.

    Args:
        store: Redis.
        space: The beginning of the entries' keys, after the store's prefix.
        max_bytes: The limit of the bytes of all entries, which should be the same for all fronts.
        lifetime_s: The time until an entry expires.
    """

    def __init__(self, store: SharedStore, space: str, max_bytes: int, lifetime_s: float) -> None:
        self.store = store
        self.max_bytes = max_bytes
        self._space = space
        self._life_ms = max(1, round(lifetime_s * 1_000))

    def key(self, kind: str, tenant: str, name: str) -> str:
        """A key of the entries."""
        return self.store.key(f"{self._space}:{kind}", tenant, name)

    async def add(
        self,
        tenant: str,
        entry_id: str,
        data: bytes,
        *,
        items: list[str] | None = None,
        last: Chain | None = None,
        version: bytes = b"",
    ) -> bool:
        """Adds an entry, or replaces the entry with the same id.

        Args:
            tenant: The tenant's name.
            entry_id: The id.
            data: The encoded entry.
            items: The ids of its items.
            last: The last turn of the entry.
            version: If not empty, only an entry of this version is replaced.

        Returns:
            False if the entry has another version.

        Raises:
            TurnGone: the turn before ``last`` is not in the store.
        """
        turn = Chain("", b"") if last is None else last
        names = [*dict.fromkeys(items or ())]
        num_bytes = len(data) + ENTRY_BYTES + ITEM_BYTES * len(names)
        head: list[str | bytes | int] = [
            entry_id,
            data,
            num_bytes,
            self._life_ms,
            self.max_bytes,
            msgspec.msgpack.encode(names),
        ]
        tail: list[str | bytes | int] = [
            turn.id,
            turn.data,
            len(turn.data) + ENTRY_BYTES,
            turn.before,
            version,
        ]
        result = int(await self._run(_ADD, quote(tenant, safe=""), *head, *tail))
        if result < 0:
            raise TurnGone
        return bool(result)

    async def find(self, tenant: str, entry_id: str, *, with_turns: bool = False) -> Found | None:
        """Returns an entry; None if it does not exist, has expired, or lacks a turn that is requested."""
        found = await self._run(_FIND, quote(tenant, safe=""), entry_id, "1" if with_turns else "0")
        if not found:
            return None
        turns = [(found[n].decode(), found[n + 1]) for n in range(2, len(found), 2)]
        return Found(found[0], found[1], turns[::-1])

    async def with_item(self, tenant: str, item_id: str) -> list[str]:
        """The ids of the entries that have an item."""
        key = self.key("item", tenant, item_id)
        members: set[bytes] = await self.store.call(lambda client: client.smembers(key))
        return [member.decode(errors="replace") for member in members]

    async def delete(self, tenant: str, entry_id: str) -> bool:
        """Deletes an entry. Returns whether it existed."""
        return bool(await self._run(_DELETE, quote(tenant, safe=""), entry_id))

    async def drop_expired(self) -> None:
        """Drops entries that have expired."""
        while await self._run(_SWEEP):
            pass

    async def sweep(self) -> None:
        """Drops expired entries every ``_SWEEP_S``, until it is cancelled."""
        while True:
            with suppress(Overloaded):  # retried at the next sweep
                await self.drop_expired()
            await anyio.sleep(_SWEEP_S)  # noqa: TID251 - the time is the purpose

    async def _run(self, script: str, *arguments: str | bytes | int) -> Any:
        return await self.store.run(script, [f"{self.store.prefix}{self._space}:"], [*arguments])
