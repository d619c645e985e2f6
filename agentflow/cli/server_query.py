"""A GET request to a running server, and the options of commands that show a server live. Each error is one
line."""

from __future__ import annotations

import argparse
import os
import ssl
import urllib.error
import urllib.request
from http.client import HTTPException
from urllib.parse import urlsplit, urlunsplit

from agentflow.cli.command import seconds_between
from agentflow.errors import (
    BadArgument,
    NotAuthorized,
    ProtocolError,
    ServerError,
    ServerUnreachable,
    untrusted_certificate,
)
from agentflow.protocol.wire import DEFAULT_PORT

DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
URL_VARIABLE, API_KEY_VARIABLE = "AGENTFLOW_URL", "AGENTFLOW_API_KEY"
TIMEOUT_S = 10.0


def http_url(url: str | None) -> str:
    """The http(s) URL of a server, without a path. ``url``: http(s) or ws(s); None: AGENTFLOW_URL, or else
    the default port of this machine. ``BadArgument`` for an invalid URL.

    >>> http_url("ws://127.0.0.1:8410/v1/session")
    'http://127.0.0.1:8410'
    """
    text = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    try:
        parts = urlsplit(text)
        scheme = {"ws": "http", "wss": "https"}.get(parts.scheme, parts.scheme)
        if (
            scheme not in ("http", "https")
            or not parts.hostname
            or (parts.port is not None and parts.port < 1)
        ):
            raise ValueError("it needs a scheme and a host")
    except ValueError as error:
        raise BadArgument(
            f"{text!r} is not the URL of a server ({error}); an example is {DEFAULT_URL}"
        ) from None
    return urlunsplit((scheme, parts.netloc, "", "", ""))


def add_live_options(
    parser: argparse.ArgumentParser,
    *,
    api_key: str,
    interval: str,
    default_s: float,
    interval_s: tuple[float, float],
) -> None:
    """Adds the options of a command that shows a server live.

    Args:
        parser: The parser of the command.
        api_key: The help of ``--api-key``.
        interval: The help of ``--interval``.
        default_s: The default of ``--interval``.
        interval_s: The minimum and maximum of ``--interval``.
    """
    add = parser.add_argument
    add("--url", help=f"URL of the server (default: {URL_VARIABLE}, or {DEFAULT_URL})")
    add("--api-key", metavar="KEY", help=f"{api_key} (default: {API_KEY_VARIABLE})")
    add(
        "--interval",
        type=seconds_between(*interval_s),
        default=default_s,
        metavar="SECONDS",
        help=f"{interval} (%(default)s)",
    )
    add("--once", action="store_true", help="show one frame and exit; the default without a terminal")


def query_server(url: str, path: str, api_key: str | None) -> bytes:
    """Returns the body of the server's answer to ``GET path``. Waits at most ten seconds.

    Raises ``ServerUnreachable`` if there is no answer, ``NotAuthorized`` if the key is missing or lacks the
    permission, ``ProtocolError`` if the address is not an agentflow server, and ``ServerError`` for other
    errors of the server.
    """
    key = api_key or os.environ.get(API_KEY_VARIABLE)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        with error:
            raise _refused(url, path, error.code, has_key=key is not None) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise ServerUnreachable(untrusted_certificate(url, reason)) from None
        raise ServerUnreachable(
            f"no answer from {url} ({reason}): is `agentflow serve` running there?"
        ) from None


def _refused(url: str, path: str, status: int, *, has_key: bool) -> ServerError:
    match status:
        case 401 if not has_key:
            return NotAuthorized(f"{url} requires an API key: give --api-key or set {API_KEY_VARIABLE}")
        case 401:
            return NotAuthorized(f"{url} rejected the API key")
        case 403:
            return NotAuthorized(f"this API key may not read {path} of {url}")
        case 404 | 405:
            return ProtocolError(f"{url} has no {path}: it is not an agentflow server, or an older version")
        case _:
            return ServerError(f"{url} answered {path} with status {status}")
