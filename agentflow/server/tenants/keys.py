"""Whose request it is: API keys and the tenants that they name.

Three ways to say who may come: nobody says anything, and one tenant stands for all (``Tenants()``); keys
on the command line, for one tenant of the name ``default`` that may see the metrics; and a file of
tenants (``keys_file``), which can be read again while the server runs.

Keys are kept as SHA-256, without salt and in one round: that is as good as the key itself where the key
is 256 random bits, which ``new_key`` makes. A key that somebody thought up can be guessed from its hash.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agentflow.errors import BadArgument, NotAuthorized
from agentflow.server.tenants.failed_keys import FailedKeys
from agentflow.server.tenants.keys_file import read_keys_file
from agentflow.server.tenants.tenant import NOBODY_ELSE, Tenant

KEY_BYTES = 32
DEFAULT_TENANT = Tenant("default", sees_metrics=True)
"""Whom the keys of the command line name."""

# What goes through a header as it is.
_API_KEY = re.compile(r"[!-~]([ -~]*[!-~])?")


def new_key() -> tuple[str, str]:
    """A new key, and what stands for it in a keys file.

    >>> key, hashed = new_key()
    >>> key, hashed
    ('af-…', 'sha256:…')
    """
    key = "af-" + secrets.token_urlsafe(KEY_BYTES)
    return key, hashed_key(key)


def hashed_key(key: str) -> str:
    """What stands for a key in a keys file."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def key_of_header(authorization: str | None, x_api_key: str | None) -> str | None:
    """The key that a request came with: of ``Authorization: Bearer KEY``, or else of ``x-api-key``. None
    where there is neither; another scheme than ``Bearer`` is none of ours."""
    scheme, _, credentials = (authorization or "").strip().partition(" ")
    bearer = credentials.strip() if scheme.lower() == "bearer" else None
    if bearer or x_api_key is None:
        return bearer
    return x_api_key.strip()


def key_of_headers(headers: Mapping[str, str]) -> str | None:
    """The same, of all headers (names in any case)."""
    return key_of_header(headers.get("authorization"), headers.get("x-api-key"))


class Tenants:
    """Who may use the server, found by the key that a request comes with.

    ``keys``: of the tenant ``default``. ``file``: a keys file. With neither there is one tenant for
    everybody. ``BadArgument`` where they make no sense.

    >>> tenants = Tenants(file=Path("keys.toml"))
    >>> tenants.of("af-…")
    Tenant(name='alice', share=2.0, …)
    >>> tenants.of(None)
    Traceback (most recent call last):
    NotAuthorized: this server wants an API key: …
    """

    def __init__(self, keys: Sequence[str] = (), file: Path | None = None) -> None:
        self._keys = tuple(keys)
        self._file = file
        self._tenant_of = self._read()
        self.failed_keys = FailedKeys()

    @property
    def need_keys(self) -> bool:
        """Whether a request must come with a key."""
        return bool(self._keys) or self._file is not None

    def __iter__(self) -> Iterator[Tenant]:
        """All tenants, in order of the file."""
        if not self.need_keys:
            yield NOBODY_ELSE
        yield from {tenant.name: tenant for tenant in self._tenant_of.values()}.values()

    def of_request(self, headers: Mapping[str, str], address: str | None) -> Tenant:
        """Whose request it is that came with these headers (names in any case) from this IP address.
        ``NotAuthorized``, and ``RateLimited`` where too many wrong keys came from there."""
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

    def still_names(self, key: str | None, tenant: Tenant) -> bool:
        """Whether the key, which named this tenant once, names it now."""
        try:
            return self.of(key).name == tenant.name
        except NotAuthorized:
            return False

    def of(self, key: str | None) -> Tenant:
        """Whom the key names. ``NotAuthorized`` where it names nobody, or is missing and wanted. How long
        that takes does not tell how near a wrong key was."""
        if not self.need_keys:
            return NOBODY_ELSE
        if key is None:
            raise NotAuthorized(
                "this server wants an API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
            )
        given = hashed_key(key).encode()
        found: Tenant | None = None
        for hashed, tenant in self._tenant_of.items():
            if hmac.compare_digest(hashed, given):
                found = tenant  # and on to the end, as for a key that is nobody's
        if found is None:
            raise NotAuthorized(
                "this API key is not known here: check it, or ask for one where the server is run"
            )
        return found

    def current(self, tenant: Tenant) -> Tenant:
        """What the tenant of that name may use now; for whoever keeps a tenant longer than a request takes.
        ``NotAuthorized`` where nobody has that name any more."""
        for now in self:
            if now.name == tenant.name:
                return now
        raise NotAuthorized(f"the tenant {tenant.name!r} has no API key here any more")

    def reload(self) -> None:
        """Reads the file again. ``BadArgument`` where it cannot be used now: what it said before stays in
        force. Opens a file, so call it off the event loop."""
        self._tenant_of = self._read()

    def _read(self) -> dict[bytes, Tenant]:
        tenant_of = {_hashed_argument(key): DEFAULT_TENANT for key in self._keys}
        for hashed, tenant in read_keys_file(self._file).items() if self._file is not None else ():
            if tenant.name == DEFAULT_TENANT.name and self._keys:
                raise BadArgument(
                    f"{self._file}: tenants.{tenant.name} is the name of those whose keys the command line "
                    "has: choose another, or move the keys into the file"
                )
            if hashed.encode() in tenant_of:
                raise BadArgument(f"{self._file}: tenants.{tenant.name} has a key of the command line")
            tenant_of[hashed.encode()] = tenant
        return tenant_of


def _hashed_argument(key: str) -> bytes:
    if not _API_KEY.fullmatch(key):
        raise BadArgument("an API key must be printable ASCII, not empty, and without spaces at its ends")
    return hashed_key(key).encode()
