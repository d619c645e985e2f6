"""The file of tenants: who may use the server, by the hashes of their keys, and how much of it.

::

    [tenants.alice]
    keys = ["sha256:9f86d0…"]        # what `agentflow key` printed; never the key itself
    share = 2.0                      # of the engine's work, against that of others (default: 1)
    requests_per_minute = 600        # no limit where this or one of the next two is left out
    tokens_per_minute = 100_000
    max_unfinished = 64
    models = ["smollm2-135m"]        # default: all
    sees_metrics = false

Whatever is not exactly so is refused in one line that names the file and the field, and never shows a key.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from agentflow.engine.request import MAX_SHARE, MIN_SHARE
from agentflow.errors import BadArgument
from agentflow.server.tenants.tenant import Tenant

MAX_NAME_CHARS = 64

_HASHED = re.compile(r"sha256:[0-9a-f]{64}")
_Share: TypeAlias = Annotated[float, msgspec.Meta(ge=MIN_SHARE, le=MAX_SHARE)]
_Amount: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
_ModelName: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class _Entry(msgspec.Struct, frozen=True):
    """A tenant in the file: the fields of ``Tenant``, with keys in place of the name."""

    keys: list[str]
    share: _Share = 1.0
    requests_per_minute: _Amount | None = None
    tokens_per_minute: _Amount | None = None
    max_unfinished: _Amount | None = None
    models: Annotated[tuple[_ModelName, ...], msgspec.Meta(min_length=1)] | None = None
    sees_metrics: bool = False


def read_keys_file(file: Path) -> dict[str, Tenant]:
    """Each hashed key with the tenant that it names, in order of the file. ``BadArgument`` where anything
    is wrong with the file. A tenant with an empty list of keys is one who may not come now."""
    tenant_of: dict[str, Tenant] = {}
    place_of: dict[str, str] = {}
    for name, table in _tables(file).items():
        _check_name(file, name)
        place = f"tenants.{name}"
        entry = _entry(f"{file}: {place}", table)
        limits = msgspec.structs.asdict(entry)
        tenant = Tenant(name, **{field: value for field, value in limits.items() if field != "keys"})
        for number, hashed in enumerate(entry.keys):
            here = f"{place}.keys[{number}]"
            _check_hashed(f"{file}: {here}", hashed)
            if hashed in place_of:
                raise BadArgument(f"{file}: {here} is the same key as {place_of[hashed]}")
            place_of[hashed] = here
            tenant_of[hashed] = tenant
    return tenant_of


def _tables(file: Path) -> dict[str, Any]:
    """The tables of the tenants, not looked into."""
    try:
        content = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise BadArgument(f"{file}: it cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, or no TOML
        raise BadArgument(f"{file}: this is no TOML: {error}") from error
    for name in content.keys() - {"tenants"}:
        raise BadArgument(f"{file}: there is no field {name!r}; each tenant is a table [tenants.NAME]")
    tenants = content.get("tenants")
    if not isinstance(tenants, dict) or not tenants:
        raise BadArgument(f"{file}: it names no tenant; each is a table [tenants.NAME]")
    return tenants


def _check_name(file: Path, name: str) -> None:
    if not name.strip() or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise BadArgument(
            f"{file}: tenants.{name[:MAX_NAME_CHARS]!r}: a tenant's name is 1 to {MAX_NAME_CHARS} printable "
            "characters"
        )


def _entry(place: str, table: object) -> _Entry:
    fields = _Entry.__struct_fields__
    if not isinstance(table, dict):
        raise BadArgument(f"{place} must be a table; its fields are: {', '.join(fields)}")
    for name in table:
        if name not in fields:
            raise BadArgument(f"{place}.{name}: there is no such field; there are: {', '.join(fields)}")
    try:
        return msgspec.convert(table, _Entry)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        raise BadArgument(f"{place}{where.rstrip('`')}: {what}") from None


def _check_hashed(place: str, hashed: str) -> None:
    if not _HASHED.fullmatch(hashed):
        raise BadArgument(
            f"{place} is no hashed key: keep the key itself to yourself and write 'sha256:' and the 64 "
            "hexadecimal digits of its SHA-256; `agentflow key` makes a key and prints both, and "
            "`printf %s KEY | sha256sum` hashes one that you have"
        )
