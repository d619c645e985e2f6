"""Fetches images and videos from hosts that the operator allows, for models of this server.

A client chooses the URL, so it must not reach this machine's private network (server-side request forgery).
The host is resolved, all of its addresses must be public, and the connection goes to one of these addresses,
not to the name, which could resolve to another address by then. A redirect is checked in the same way. Models
behind an API get the URL itself.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

import anyio
import anyio.to_thread
import httptools
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

from agentflow.engine.media.reader import KeyedSemaphores
from agentflow.errors import BadArgument, Overloaded
from agentflow.protocol.images import (
    Image,
    MediumKind,
    detect_media_type,
    detect_video_type,
    image_file,
    max_file_bytes,
)
from agentflow.server.addresses import parse_address
from agentflow.version import __version__

FETCH_S: Final = 20.0
"""The time limit for one file, including redirects, once its fetch begins."""
MAX_REDIRECTS: Final = 3
MAX_FETCHES: Final = 16
"""The limit of files that are fetched concurrently."""
MAX_FETCHES_OF_TENANT: Final = 8
MAX_WAITING: Final = 256
HTTPS_PORT: Final = 443
_MAX_HEAD_BYTES: Final = 65_536
_MAX_OTHER_BYTES: Final = 4_000_000
"""The limit of the bytes of an answer outside of the file: headers, trailers and the sizes of chunks."""
_CHUNK_BYTES: Final = 65_536
_FIRST_BYTES: Final[dict[MediumKind, int]] = {"image": 12, "video": 64}
"""The number of first bytes by which the type of a file is detected."""
_KINDS: Final[dict[MediumKind, str]] = {
    "image": "PNG, JPEG, GIF and WebP",
    "video": "MP4, MOV, WebM, Matroska, AVI and MPEG",
}
_NOT_IN_A_REQUEST: Final = re.compile(r"[^\x21-\x7e]")
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_UNICAST: Final = ipaddress.ip_network("2000::/3")
"""All public addresses of IPv6. ``is_global`` is also true for obsolete networks outside of it, such as
fec0::/10, and for IPv4 addresses that are embedded in IPv6."""
_SPECIAL: Final = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))
"""Networks of protocols and documentation for which ``is_global`` is true."""


def is_public(address: str) -> bool:
    """Whether an address is public. An IPv6 address that embeds an IPv4 address is public if that is, too.

    >>> is_public("93.184.216.34"), is_public("127.0.0.1"), is_public("169.254.169.254")
    (True, False, False)
    >>> is_public("::ffff:10.0.0.1"), is_public("64:ff9b::a00:1"), is_public("2002:a00:1::")
    (False, False, False)
    """
    found = parse_address(address)
    if found is None:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        inner = found.sixtofour or (found.teredo[1] if found.teredo else None)
        if found not in _UNICAST or (inner is not None and not is_public(str(inner))):
            return False
    return found.is_global and not found.is_multicast and not any(found in network for network in _SPECIAL)


@dataclass(frozen=True, slots=True)
class _Target:
    """A URL that was checked."""

    url: str
    host: str
    path: str


class ImageFetcher:
    """Fetches images and videos.

    Args:
        hosts: The names of allowed hosts; ``*.example.org`` allows all names below example.org, and ``*``
            allows all hosts. Empty: none.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple([host.lower() for host in hosts])
        self._turns = anyio.Semaphore(MAX_FETCHES)
        self._turns_of = KeyedSemaphores[str](MAX_FETCHES_OF_TENANT)
        self._num_waiting = 0

    async def fetch(self, url: str, kind: MediumKind = "image", tenant: str = "") -> Image:
        """Returns the image, or the file of a video, at an ``https:`` URL. A tenant fetches at most
        ``MAX_FETCHES_OF_TENANT`` files at a time, so its slow hosts do not delay other tenants.

        Raises:
            BadArgument: the host is not allowed or not reachable, or there is no such file. Its ``param`` is
                ``image`` or ``video``.
            Overloaded: too many files are being fetched.
        """
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} files are being fetched, which is the limit: try again later")
        try:
            return await self._fetch(url, kind, tenant)
        except BadArgument as error:
            if error.param is not None:  # from reading the fetched file
                raise
            raise BadArgument(f"{kind}: {error}", param=kind) from error

    async def _fetch(self, url: str, kind: MediumKind, tenant: str) -> Image:
        target = self._checked(url)
        self._num_waiting += 1
        try:
            async with self._turns_of.one(tenant), self._turns:
                with anyio.fail_after(FETCH_S):
                    data = await self._follow(target, kind)
        except TimeoutError:
            raise _wrong(f"{target.host} did not answer within {FETCH_S:g} s") from None
        finally:
            self._num_waiting -= 1
        return await anyio.to_thread.run_sync(image_file, data, kind)

    def _checked(self, url: str, base: str = "") -> _Target:
        try:
            url = urljoin(base, url)
            parts = urlsplit(url)
            host, port = (parts.hostname or "").removesuffix("."), parts.port
        except ValueError:
            raise _wrong(f"{url[:80]!r} is not a URL") from None
        if parts.scheme != "https" or not host or port not in (None, HTTPS_PORT) or "@" in parts.netloc:
            raise _wrong(
                f"{_shown(parts)!r} cannot be fetched: the server fetches only https: URLs, on port 443 and "
                "without a user"
            )
        if not self._allows(host):
            raise _wrong(
                f"this server fetches nothing from {host[:80]!r}: send the file itself, as a data: URL, "
                "or ask the operator to allow the host (image_hosts)"
            )
        path = parts.path or "/"
        path = f"{path}?{parts.query}" if parts.query else path
        if _NOT_IN_A_REQUEST.search(path + host):
            raise _wrong("the URL has characters that must be percent-encoded")
        return _Target(url, host, path)

    def _allows(self, host: str) -> bool:
        names = {host, "*", *["*." + host[at + 1 :] for at, char in enumerate(host) if char == "."]}
        return not names.isdisjoint(self._hosts)

    async def _follow(self, target: _Target, kind: MediumKind) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            answer = await self._get(target, kind)
            if not answer.redirect:
                return answer.data()
            target = self._checked(answer.redirect, target.url)
        raise _wrong(f"{target.host} redirects more than {MAX_REDIRECTS} times")

    async def _get(self, target: _Target, kind: MediumKind) -> _Answer:
        answer = _Answer(target.host, kind)
        host = f"[{target.host}]" if ":" in target.host else target.host
        head = (
            f"GET {target.path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: agentflow/{__version__}\r\n"
            f"Accept: {kind}/*\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
        )
        try:
            stream = await _connect(target.host)
            try:
                await stream.send(head.encode("ascii"))
                while not answer.is_whole:
                    answer.push(await stream.receive(_CHUNK_BYTES))
            except anyio.EndOfStream:
                answer.end()
            finally:
                await anyio.aclose_forcefully(stream)
        except (OSError, anyio.BrokenResourceError, httptools.HttpParserError) as error:
            raise _wrong(f"{target.host} cannot be reached, or its answer is not HTTP") from error
        return answer


class _Answer:
    """Parses an HTTP response. The errors have none of its content, which the client may not see."""

    def __init__(self, host: str, kind: MediumKind) -> None:
        self.is_whole = False
        self.location = ""
        self._host = host
        self._kind: MediumKind = kind
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0  # after the headers
        self._body = bytearray()
        self._num_bytes = 0
        self._has_length = False

    def push(self, piece: bytes) -> None:
        """Parses more bytes from the host."""
        self._num_bytes += len(piece)
        if not self._status and self._num_bytes > _MAX_HEAD_BYTES:
            raise _wrong(f"the headers of {self._host} are too large")
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:  # no HttpParserError
            if not self.is_whole:
                raise _wrong(f"{self._host} changes the protocol") from None
        except httptools.HttpParserError:
            if not self.is_whole:  # bytes after the announced length are ignored
                raise
        if 300 <= self._status < 400 and self.location:
            self.is_whole = True
        elif self._status not in (0, 200):
            raise _wrong(f"{self._host} answered with the status {self._status}")
        elif len(self._body) > (most := max_file_bytes(self._kind)):
            raise _wrong(f"the file of {self._host} has more than {most:,} bytes")
        elif self._num_bytes - len(self._body) > _MAX_OTHER_BYTES:
            raise _wrong(f"the trailers or chunks of {self._host} are too large")
        elif len(self._body) >= _FIRST_BYTES[self._kind] or self.is_whole:
            self._check_kind()

    def end(self) -> None:
        """The host has closed the connection."""
        if self._has_length or not self._status:
            raise _wrong(f"{self._host} closed the connection too early")
        self._check_kind()
        self.is_whole = True

    @property
    def redirect(self) -> str:
        """The address to which the response redirects; empty if it does not."""
        return self.location if self._status != 200 else ""

    def data(self) -> bytes:
        """The file."""
        return bytes(self._body)

    def _check_kind(self) -> None:
        kind = self._kind
        try:
            (detect_video_type if kind == "video" else detect_media_type)(self._body[: _FIRST_BYTES[kind]])
        except BadArgument:
            raise _wrong(f"{self._host} sent no {kind}: {_KINDS[kind]} are supported") from None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        match name.lower():
            case b"location":
                self.location = value.decode("latin-1")
            case b"content-length" | b"transfer-encoding":
                self._has_length = True
            case _:
                pass

    def on_headers_complete(self) -> None:
        """Called by the parser, also for informational responses (1xx)."""
        status = self._parser.get_status_code()
        if status >= 200:
            self._status = status

    def on_body(self, piece: bytes) -> None:
        """Called by the parser."""
        if not self.is_whole:
            self._body += piece

    def on_message_complete(self) -> None:
        """Called by the parser, also for informational responses (1xx)."""
        self.is_whole = self._status > 0


async def _connect(host: str) -> ByteStream:
    """Connects to the first address of a host that answers. All of its addresses must be public."""
    addresses = await _addresses(host)
    if not addresses:
        raise _wrong(f"the host {host} cannot be resolved")
    if not all(map(is_public, addresses)):
        raise _wrong(f"{host} has an address that is not public")
    for number, address in enumerate(addresses):
        try:
            stream = await anyio.connect_tcp(address, HTTPS_PORT)
            try:
                return await TLSStream.wrap(
                    stream, hostname=host, ssl_context=_tls_context(), standard_compatible=False
                )
            except BaseException:
                await anyio.aclose_forcefully(stream)
                raise
        except OSError:
            if number == len(addresses) - 1:
                raise
    raise AssertionError("unreachable")


async def _addresses(host: str) -> list[str]:
    # Not in the shared worker threads, which serve the whole server: a name server may be slow.
    resolve = partial(socket.getaddrinfo, host, HTTPS_PORT, type=socket.SOCK_STREAM)
    try:
        found = await anyio.to_thread.run_sync(
            resolve, limiter=anyio.CapacityLimiter(1), abandon_on_cancel=True
        )
    except (OSError, UnicodeError):  # UnicodeError: a label that is invalid in a host name
        return []
    return list(dict.fromkeys([str(address[0]) for *_, address in found]))


@cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


def _shown(parts: SplitResult) -> str:
    """The URL without its path, user and password."""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"[:80]


def _wrong(why: str) -> BadArgument:
    return BadArgument(why)
