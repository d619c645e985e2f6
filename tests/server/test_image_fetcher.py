"""Fetching images: only from allowed hosts with public addresses, and within bounds."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream, SocketStream
from anyio.streams.tls import TLSStream
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param

from agentflow.errors import BadArgument
from agentflow.protocol.images import MAX_IMAGE_BYTES, image_file
from agentflow.server import image_fetcher
from agentflow.server.image_fetcher import ImageFetcher, is_public

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

CERTIFICATE = Path(__file__).parents[1] / "support" / "localhost_for_tests.pem"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(300)
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
ONE_CHUNK = b"%x\r\n%b\r\n" % (len(PNG), PNG)
LENGTH = b"content-length: %d\r\n\r\n" % len(PNG)
UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n"
SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\n" + UPGRADE + b"\r\n"
Answers = Callable[[str], bytes]


@asynccontextmanager
async def _host(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[bytes]]:
    """A web server that stands for ``localhost``, and the requests that it gets."""
    received: list[bytes] = []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    trusting = ssl.create_default_context(cafile=str(CERTIFICATE))

    async def serve(plain: SocketStream) -> None:
        async with plain:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError, OSError):  # the client has left
                stream = await TLSStream.wrap(
                    plain, server_side=True, ssl_context=context, standard_compatible=False
                )
                received.append(await stream.receive())
                await stream.send(answers(received[-1].split(b" ")[1].decode()))
                await stream.aclose()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    monkeypatch.setattr(image_fetcher, "HTTPS_PORT", listener.extra(anyio.abc.SocketAttribute.local_port))
    monkeypatch.setattr(image_fetcher, "_tls_context", lambda: trusting)
    monkeypatch.setattr(image_fetcher, "is_public", lambda address: True)
    async with anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield received
        group.cancel_scope.cancel()
    await listener.aclose()


async def _refused(fetcher: ImageFetcher, url: str) -> str:
    with pytest.raises(BadArgument) as raised:
        await fetcher.fetch(url)
    assert raised.value.param == "image"
    return str(raised.value)


ANSWERS = {
    "with a length": OK + LENGTH + PNG,
    "in chunks": OK + CHUNKED + ONE_CHUNK + b"0\r\n\r\n",
    "until the end": OK + b"\r\n" + PNG,
    "of another type": OK + b"content-type: text/html\r\n" + LENGTH + PNG,
    "after an informational one": b"HTTP/1.1 103 Early Hints\r\n\r\n" + OK + LENGTH + PNG,
    "with more behind it": OK + LENGTH + PNG + b"HTTP/1.1 200 OK\r\n\r\nmore",
    "with an offer to upgrade": OK + UPGRADE + LENGTH + PNG,
    "before another protocol": OK + LENGTH + PNG + SWITCHING,
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_image_is_fetched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with _host(lambda path: ANSWERS[name], monkeypatch) as received:
        image = await ImageFetcher(["localhost"]).fetch("https://localhost/a%20b.png?x=1#part")
    assert image is image_file(PNG)
    assert received[0].startswith(b"GET /a%20b.png?x=1 HTTP/1.1\r\nHost: localhost\r\n")


async def test_a_video_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = b"\x00\x00\x00\x18ftypmp42" + bytes(100)
    head = OK + b"content-length: %d\r\n\r\n"
    answers = {"/clip": head % len(clip) + clip, "/image": ANSWERS["with a length"]}
    async with _host(answers.__getitem__, monkeypatch):
        fetcher = ImageFetcher(["localhost"])
        assert await fetcher.fetch("https://localhost/clip", "video") is image_file(clip, "video")
        for path, kind in (("clip", "image"), ("image", "video")):
            with pytest.raises(BadArgument, check=has_param(kind)):
                await fetcher.fetch(f"https://localhost/{path}", kind)  # type: ignore[arg-type]


SECRET = b'{"secret": 1}'
WRONG = {
    "no image": OK + b"content-length: 13\r\n\r\n" + SECRET,
    "an svg": OK + b"\r\n<svg xmlns='http://www.w3.org/2000/svg'/>",
    "nothing": OK + b"content-length: 0\r\n\r\n",
    "cut": OK + LENGTH + PNG[:-1],
    "cut in a chunk": OK + CHUNKED + b"%x\r\n%b" % (len(PNG), PNG[:-1]),
    "cut in the head": OK + b"content-le",
    "no http": b"SSH-2.0-OpenSSH_9.9\r\n",
    "silence": b"",
    "a failure": b"HTTP/1.1 404 Not Found\r\n" + LENGTH + PNG,
    "a redirect to nowhere": b"HTTP/1.1 302 Found\r\n" + LENGTH + PNG,
    "large headers": OK + b"x: %b\r\n" % bytes(b"a" * 100_000) + LENGTH + PNG,
    "a large image": OK + b"\r\n" + PNG + bytes(MAX_IMAGE_BYTES),
    "tiny chunks": OK + CHUNKED + ONE_CHUNK + b"1\r\na\r\n" * 1_000_000 + b"0\r\n\r\n",
    "long trailers": OK + CHUNKED + ONE_CHUNK + b"0\r\nx: " + b"a" * 5_000_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", WRONG)
async def test_other_answers_are_refused_without_showing_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _host(lambda path: WRONG[name], monkeypatch):
        why = await _refused(ImageFetcher(["localhost"]), "https://localhost/")
    assert "secret" not in why


@pytest.mark.parametrize("more", [b"", PNG, OK + LENGTH + PNG])
async def test_f37_a_host_that_changes_the_protocol_is_refused(
    more: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _host(lambda path: SWITCHING + more, monkeypatch):
        why = await _refused(ImageFetcher(["localhost"]), "https://localhost/")
    assert "changes the protocol" in why


async def test_a_redirect_is_followed_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {
        "/relative": "/image",
        "/absolute": "https://localhost/relative",
        "/elsewhere": "https://other.example/image",
        "/plain": "http://localhost/image",
        "/file": "file:///etc/passwd",
        "/port": "https://localhost:8443/image",
        "/circle": "/circle",
        "/broken": "https://[/",
    }

    def answers(path: str) -> bytes:
        if path == "/image":
            return ANSWERS["with a length"]
        return b"HTTP/1.1 302 Found\r\nlocation: %b\r\ncontent-length: 0\r\n\r\n" % places[path].encode()

    fetcher = ImageFetcher(["localhost"])
    async with _host(answers, monkeypatch) as received:
        for path in ("/relative", "/absolute"):
            assert await fetcher.fetch(f"https://localhost{path}") is image_file(PNG)
        for path in ("/elsewhere", "/plain", "/file", "/port", "/broken"):
            received.clear()
            await _refused(fetcher, f"https://localhost{path}")
            assert len(received) == 1
        received.clear()
        await _refused(fetcher, "https://localhost/circle")
        assert len(received) == image_fetcher.MAX_REDIRECTS + 1


async def test_a_host_with_another_certificate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _host(lambda path: ANSWERS["with a length"], monkeypatch) as received:
        # Both names have the same address, and the certificate is of the first.
        async def same(host: str) -> list[str]:
            return ["127.0.0.1"]

        monkeypatch.setattr(image_fetcher, "_addresses", same)
        await ImageFetcher(["*"]).fetch("https://localhost/")
        received.clear()
        await _refused(ImageFetcher(["*"]), "https://other.example/")
    assert not received


async def test_a_slow_host_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetcher, "FETCH_S", 0.05)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    monkeypatch.setattr(image_fetcher, "HTTPS_PORT", listener.extra(anyio.abc.SocketAttribute.local_port))
    monkeypatch.setattr(image_fetcher, "is_public", lambda address: True)
    async with listener:
        await _refused(ImageFetcher(["localhost"]), "https://localhost/")


async def test_f37_slow_hosts_of_a_tenant_leave_room_for_other_tenants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = image_fetcher._connect

    async def connect_or_wait(host: str) -> ByteStream:
        if host != "localhost":
            await anyio.sleep_forever()
        return await connect(host)

    monkeypatch.setattr(image_fetcher, "_connect", connect_or_wait)
    fetcher = ImageFetcher(["*"])
    async with _host(lambda path: ANSWERS["with a length"], monkeypatch), anyio.create_task_group() as group:
        for _ in range(image_fetcher.MAX_FETCHES):
            group.start_soon(fetcher.fetch, "https://slow.example/", "image", "ann")
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(10):
            assert await fetcher.fetch("https://localhost/", "image", "bob") is image_file(PNG)
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.1.2.3"],
        ["169.254.169.254"],
        ["::1"],
        ["fe80::1"],
        ["93.184.216.34", "10.0.0.1"],
        [],
    ],
)
async def test_a_host_must_have_public_addresses_only(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolved(host: str) -> list[str]:
        return addresses

    async def connected(*args: object) -> None:
        pytest.fail("it connects")

    monkeypatch.setattr(image_fetcher, "_addresses", resolved)
    monkeypatch.setattr(anyio, "connect_tcp", connected)
    await _refused(ImageFetcher(["*"]), "https://a.example/")


async def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def resolved(host: str) -> list[str]:
        asked.append(host)
        return ["93.184.216.34"]

    async def connected(host: str, port: int) -> None:
        asked.append(host)
        raise ConnectionRefusedError

    monkeypatch.setattr(image_fetcher, "_addresses", resolved)
    monkeypatch.setattr(anyio, "connect_tcp", connected)
    await _refused(ImageFetcher(["a.example"]), "https://A.example./x")
    assert asked == ["a.example", "93.184.216.34"]


@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        ([], "https://a.example/x"),
        (["a.example"], "https://b.example/x"),
        (["a.example"], "https://x.a.example/x"),
        (["*.a.example"], "https://a.example/x"),
        (["*.a.example"], "https://xa.example/x"),
        (["a.example"], "https://a.example.evil.example/x"),
        (["a.example"], "https://evil.example\\@a.example/x"),
        (["a.example"], "https://user@a.example/x"),
        (["a.example"], "https://a.example:22/x"),
        (["a.example"], "https://a.example:x/"),
        (["a.example"], "http://a.example/x"),
        (["a.example"], "https://a.example/x\r\nHost: b"),
        (["a.example"], "https://a.example/x y"),
        (["a.example"], "https:///x"),
        (["*"], "https://[::1/x"),
        (["*"], "https:/a"),
    ],
)
async def test_other_urls_are_refused(hosts: list[str], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolved(host: str) -> list[str]:
        pytest.fail("it is resolved")

    monkeypatch.setattr(image_fetcher, "_addresses", resolved)
    await _refused(ImageFetcher(hosts), url)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "192.168.1.1",
        "198.18.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::1",
        "2001:0:7f00:1::",
        "fc00::1",
        "fe80::1%eth0",
        "ff02::1",
        "::7f00:1",
        "::ffff:0:7f00:1",
        "64:ff9b:1::7f00:1",
        "fec0::1",
        "3fff::1",
        "5f00::1",
        "192.0.0.9",
        "localhost",
        "",
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@given(st.ip_addresses(v=4))
def test_an_address_in_an_address_is_no_more_public(address: object) -> None:
    bits = int(address)  # type: ignore[call-overload]
    if not is_public(str(address)):
        assert not is_public(f"::ffff:{bits >> 16:x}:{bits & 0xFFFF:x}")
        assert not is_public(f"64:ff9b::{bits >> 16:x}:{bits & 0xFFFF:x}")
        assert not is_public(f"2002:{bits >> 16:x}:{bits & 0xFFFF:x}::1")
    assert not is_public(f"::{bits >> 16:x}:{bits & 0xFFFF:x}")


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "a..example"])
async def test_names_that_cannot_exist_are_not_resolved(host: str) -> None:
    assert "cannot be resolved" in await _refused(ImageFetcher(["*"]), f"https://{host}/")
