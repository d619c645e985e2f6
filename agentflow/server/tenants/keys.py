"""API keys and the tenants that they identify.

Without keys, all requests belong to one anonymous tenant (``Tenants()``). Keys on the command line belong to
a tenant named ``default``, which may see the metrics. A keys file has several tenants and can be read again
while the server runs.

Keys are stored as one round of SHA-256 without salt. That is safe for keys of 256 random bits, which
``new_key`` creates. A key that a person chose can be guessed from its hash.

The keys file has the hashes of each tenant's keys, and its limits::

    [tenants.alice]
    keys = ["sha256:9f86d0…"]        # printed by `agentflow key`; never the key itself
    weight = 2.0                     # relative weight of the tenant's work (default: 1)
    requests_per_minute = 600        # default of this and the next three limits: none
    tokens_per_minute = 100_000
    max_cost_per_day = 5.0           # US dollars, for models behind an API
    max_unfinished = 64
    models = ["smollm2-135m"]        # default: all
    sees_metrics = false

The message of an error in the file is one line with the file and the field, and never contains a key.

``FailedKeys`` limits wrong keys from each address, so that keys cannot be guessed. Each address has a bucket
of failures that refills within a minute. While it is empty, only keys that were valid from this address
before are accepted, so clients that share an address with an attacker can continue. Both tables are bounded
and evict the least recently used entries. This machine is exempt, because a proxy on it may serve all clients
(``addresses.client_network``).
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from agentflow.engine.request import MAX_WEIGHT, MIN_WEIGHT
from agentflow.engine.tenant import ANONYMOUS, Tenant
from agentflow.errors import BadArgument, NotAuthorized, RateLimited
from agentflow.protocol.wire import API_KEY
from agentflow.server.addresses import client_network
from agentflow.server.tenants.rate_limit import Bucket
from agentflow.server.tenants.tickets import SessionTickets, TicketStore

MAX_NAME_CHARS = 64
MAX_DOLLARS = 1e9

_HASHED = re.compile(r"sha256:[0-9a-f]{64}")
_Weight: TypeAlias = Annotated[float, msgspec.Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)]
_Amount: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
_Dollars: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=MAX_DOLLARS)]
_ModelName: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class _Entry(msgspec.Struct, frozen=True):
    """A tenant in the file: the fields of ``Tenant``, with keys instead of the name."""

    keys: list[str]
    weight: _Weight = 1.0
    requests_per_minute: _Amount | None = None
    tokens_per_minute: _Amount | None = None
    max_cost_per_day: _Dollars | None = None
    max_unfinished: _Amount | None = None
    models: Annotated[tuple[_ModelName, ...], msgspec.Meta(min_length=1)] | None = None
    sees_metrics: bool = False
    manages_adapters: bool = False


def read_keys_file(file: Path) -> dict[str, Tenant]:
    """Returns the tenant of each hashed key, in the order of the file. ``BadArgument`` for an invalid file. A
    tenant with an empty list of keys is disabled."""
    tenant_of: dict[str, Tenant] = {}
    field_of: dict[str, str] = {}
    for name, table in _tables(file).items():
        _check_name(file, name)
        section = f"tenants.{name}"
        entry = _entry(f"{file}: {section}", table)
        limits = msgspec.structs.asdict(entry)
        tenant = Tenant(name, **{field: value for field, value in limits.items() if field != "keys"})
        for number, hashed in enumerate(entry.keys):
            here = f"{section}.keys[{number}]"
            _check_hashed(f"{file}: {here}", hashed)
            if hashed in field_of:
                raise BadArgument(f"{file}: {here} is the same key as {field_of[hashed]}")
            field_of[hashed] = here
            tenant_of[hashed] = tenant
    return tenant_of


def _tables(file: Path) -> dict[str, Any]:
    """The tables of the tenants, not validated."""
    try:
        content = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise BadArgument(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        raise BadArgument(f"{file}: not valid TOML: {error}") from error
    for name in content.keys() - {"tenants"}:
        raise BadArgument(f"{file}: unknown field {name!r}; each tenant is a table [tenants.NAME]")
    tenants = content.get("tenants")
    if not isinstance(tenants, dict) or not tenants:
        raise BadArgument(f"{file}: no tenants; each is a table [tenants.NAME]")
    return tenants


def _check_name(file: Path, name: str) -> None:
    if not name.strip() or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise BadArgument(
            f"{file}: tenants.{name[:MAX_NAME_CHARS]!r}: a tenant's name is 1 to {MAX_NAME_CHARS} printable "
            "characters"
        )


def _entry(field: str, table: object) -> _Entry:
    fields = _Entry.__struct_fields__
    if not isinstance(table, dict):
        raise BadArgument(f"{field} must be a table; its fields are: {', '.join(fields)}")
    for name in table:
        if name not in fields:
            raise BadArgument(f"{field}.{name}: unknown field (known: {', '.join(fields)})")
    try:
        return msgspec.convert(table, _Entry)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        raise BadArgument(f"{field}{where.rstrip('`')}: {what}") from None


def _check_hashed(field: str, hashed: str) -> None:
    if not _HASHED.fullmatch(hashed):
        raise BadArgument(
            f"{field} is not a hashed key: write 'sha256:' and the 64 hexadecimal digits of its SHA-256, "
            "never the key itself; `agentflow key` creates a key and prints both, and "
            "`printf %s KEY | sha256sum` hashes an existing one"
        )


FAILURES_PER_MINUTE = 30
MAX_ENTRIES = 10_000


class FailedKeys:
    """The limit of wrong keys from each address. ``address``: the IP address that the server sees; None if it
    is unknown. ``clock_ns``: nanoseconds. Not thread-safe."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._failures: OrderedDict[str, Bucket] = OrderedDict()
        self._valid: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __len__(self) -> int:
        """The number of entries of the larger table."""
        return max(len(self._failures), len(self._valid))

    def check(self, address: str | None, hashed: str) -> None:
        """``RateLimited`` if this address has sent too many wrong keys to try this key."""
        client = _client(address)
        bucket = self._failures.get(client) if client is not None else None
        if client is None or bucket is None or (client, hashed) in self._valid:
            return
        wait_ns = bucket.wait_ns(self._clock_ns())
        if wait_ns:
            error = RateLimited(
                f"too many wrong API keys came from this address: try again in {wait_ns / 1e9:,.2f} s"
            )
            error.retry_after_s = wait_ns / 1e9
            raise error

    def failed(self, address: str | None) -> None:
        """Records a wrong key from this address."""
        client = _client(address)
        if client is None:
            return
        now_ns = self._clock_ns()
        bucket = self._failures.get(client)
        if bucket is None:
            bucket = self._failures[client] = Bucket(FAILURES_PER_MINUTE, now_ns)
        bucket.take(1, now_ns)
        self._failures.move_to_end(client)
        if len(self._failures) > MAX_ENTRIES:
            self._failures.popitem(last=False)

    def passed(self, address: str | None, hashed: str) -> None:
        """Records a valid key from this address."""
        client = _client(address)
        if client is None:
            return
        self._valid[client, hashed] = None
        self._valid.move_to_end((client, hashed))
        if len(self._valid) > MAX_ENTRIES:
            self._valid.popitem(last=False)


def _client(address: str | None) -> str | None:
    return None if address is None else client_network(address)


KEY_BYTES = 32
DEFAULT_TENANT = Tenant("default", sees_metrics=True, manages_adapters=True)
"""The tenant of the keys on the command line."""


def new_key() -> tuple[str, str]:
    """A new key, and its hash for a keys file.

    >>> key, hashed = new_key()
    >>> key, hashed
    ('af-…', 'sha256:…')
    """
    key = "af-" + secrets.token_urlsafe(KEY_BYTES)
    return key, hashed_key(key)


def hashed_key(key: str) -> str:
    """The hash of a key, as in a keys file."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def key_of_header(authorization: str | None, x_api_key: str | None) -> str | None:
    """The key of a request: from ``Authorization: Bearer KEY``, or else from ``x-api-key``. None without
    either; schemes other than ``Bearer`` are ignored."""
    scheme, _, credentials = (authorization or "").strip().partition(" ")
    bearer = credentials.strip() if scheme.lower() == "bearer" else None
    if bearer or x_api_key is None:
        return bearer
    return x_api_key.strip()


def key_of_headers(headers: Mapping[str, str]) -> str | None:
    """The key in a request's headers, whose names are case-insensitive."""
    return key_of_header(headers.get("authorization"), headers.get("x-api-key"))


@dataclass(frozen=True, slots=True)
class _KnownTenants:
    """The tenants of one reading of the keys. A request finds its tenant without a walk over all."""

    by_hash: dict[str, Tenant]  # by the hash of each key
    by_name: dict[str, Tenant]  # in the order of the file


class Tenants:
    """The tenants of a server, identified by the API keys of requests.

    ``keys``: the keys of the tenant ``default``. ``file``: a keys file. Without both, all requests belong to
    one anonymous tenant. ``BadArgument`` for invalid keys or an invalid file.

    >>> tenants = Tenants(file=Path("keys.toml"))
    >>> tenants.of("af-…")
    Tenant(name='alice', weight=2.0, …)
    >>> tenants.of(None)
    Traceback (most recent call last):
    NotAuthorized: this server requires an API key: …
    """

    def __init__(self, keys: Sequence[str] = (), file: Path | None = None) -> None:
        self._keys = tuple(keys)
        self._file = file
        self._known = self._read()
        self.failed_keys = FailedKeys()
        self.tickets: TicketStore = SessionTickets()

    @property
    def need_keys(self) -> bool:
        """Whether requests need a key."""
        return bool(self._keys) or self._file is not None

    def __iter__(self) -> Iterator[Tenant]:
        """All tenants, in the order of the file."""
        yield from self._known.by_name.values()

    def of_request(self, headers: Mapping[str, str], address: str | None) -> Tenant:
        """The tenant of a request with these headers from this IP address. ``NotAuthorized`` for a missing or
        unknown key; ``RateLimited`` after too many wrong keys from the address."""
        key = key_of_headers(headers)
        if not self.need_keys or key is None:
            return self.of(key)
        hashed = hashed_key(key)
        self.failed_keys.check(address, hashed)
        try:
            tenant = self.of(key)
        except NotAuthorized:
            self.failed_keys.failed(address)
            raise
        self.failed_keys.passed(address, hashed)
        return tenant

    async def of_ticket(self, ticket: str, address: str | None) -> tuple[Tenant, str]:
        """The tenant of a session ticket from this IP address, and the hash of the key that it was issued
        for. The ticket is invalid afterwards.

        Raises:
            NotAuthorized: The ticket is wrong, used or expired, or the key was revoked.
            RateLimited: The address has sent too many wrong keys and tickets.
            Overloaded: The shared store does not answer.
        """
        if not self.need_keys:
            return ANONYMOUS, ""
        found = await self.tickets.redeem(ticket)
        if found is not None:
            name, hashed = found
            tenant = self._find(hashed)
            if tenant is not None and tenant.name == name:
                return tenant, hashed
        self.failed_keys.check(address, hashed_key(ticket))
        self.failed_keys.failed(address)
        raise NotAuthorized("this session ticket is unknown, used or expired: request another one")

    def still_names(self, key: str | None, tenant: Tenant) -> bool:
        """Whether the key still identifies this tenant."""
        try:
            return self.of(key).name == tenant.name
        except NotAuthorized:
            return False

    def still_hashed(self, hashed: str, tenant: Tenant) -> bool:
        """Whether the key with this hash still identifies this tenant."""
        found = self._find(hashed) if self.need_keys else ANONYMOUS
        return found is not None and found.name == tenant.name

    def _find(self, hashed: str) -> Tenant | None:
        """The tenant of the key with this hash. The time of the search reveals nothing about other keys,
        because no client can choose a key by its hash."""
        return self._known.by_hash.get(hashed)

    def of(self, key: str | None) -> Tenant:
        """The tenant of the key. ``NotAuthorized`` if the key is unknown, or required and missing. The time
        does not depend on how similar a wrong key is."""
        if not self.need_keys:
            return ANONYMOUS
        if key is None:
            raise NotAuthorized(
                "this server requires an API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
        found = self._find(hashed_key(key))
        if found is None:
            raise NotAuthorized("this API key is unknown: check it, or ask the server's operator for one")
        return found

    def current(self, tenant: Tenant) -> Tenant:
        """The current settings of a tenant, for callers that keep it longer than one request.
        ``NotAuthorized`` if the tenant was removed."""
        now = self._known.by_name.get(tenant.name)
        if now is not None:
            return now
        raise NotAuthorized(f"the tenant {tenant.name!r} no longer has an API key")

    def find(self, name: str) -> Tenant:
        """The tenant with this name, for a request that another server has authenticated. ``NotAuthorized``
        if it does not exist here."""
        return self.current(Tenant(name))

    def reload(self) -> None:
        """Reads the file again. ``BadArgument`` for an invalid file; then nothing changes. Blocks, so call it
        outside of the event loop."""
        self._known = self._read()

    def _read(self) -> _KnownTenants:
        tenant_of = {hashed_key(checked_key(key)): DEFAULT_TENANT for key in self._keys}
        for hashed, tenant in read_keys_file(self._file).items() if self._file is not None else ():
            if tenant.name == DEFAULT_TENANT.name and self._keys:
                raise BadArgument(
                    f"{self._file}: tenants.{tenant.name} is also the tenant of keys on the command line: "
                    "choose another name, or move the keys into the file"
                )
            if hashed in tenant_of:
                raise BadArgument(
                    f"{self._file}: tenants.{tenant.name} has a key that is also on the command line"
                )
            tenant_of[hashed] = tenant
        own = () if self.need_keys else (ANONYMOUS,)
        return _KnownTenants(tenant_of, {tenant.name: tenant for tenant in (*own, *tenant_of.values())})


def checked_key(key: str) -> str:
    """The API key. ``BadArgument`` if it cannot be in a header."""
    if not API_KEY.fullmatch(key):
        raise BadArgument("an API key must be printable ASCII, not empty, and without spaces at its ends")
    return key
