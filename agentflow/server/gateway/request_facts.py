"""The facts that the gateway reads from a request: its model, its prompt, its place in a program, and the
stored objects that it refers to.

The body is forwarded unchanged. Here its prompt becomes one text, whose prefix stays the same while a
conversation grows: tools, instructions and messages, with their roles, in the order of chat templates. The
fields of all APIs are read in the same way.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote

import jiter
import msgspec

from agentflow.cluster.routing.text_router import MAX_RUN_BYTES, text_run
from agentflow.engine.cache.token_run import TokenRun
from agentflow.engine.request import Objective
from agentflow.protocol.bounds.json_bounds import BODY_BOUNDS, PIECE_BYTES, JsonScan, TooMuchJson
from agentflow.protocol.unreadable import UNREADABLE
from agentflow.protocol.wire import MODEL_PARAM, SESSION_PARAM
from agentflow.server.errors import ApiError
from agentflow.server.http.caller import ANYONE, Caller, caller_with

MAX_NAME_CHARS = 256
BLOB_CHARS = 4_096
"""A data URL or base64 string of at least this length counts as an image or another file."""
_BLOB_BYTES = 4_096  # about a thousand tokens
_BLOB = re.compile(r"data:|[A-Za-z0-9+/_-]{256}")
_FIELDS = ("tools", "functions", "system", "instructions", "messages", "input", "prompt", "text", "input_ids")
"""The fields of prompts, in the order in which chat templates write them."""
_REFERENCES = ("previous_response_id", "conversation", "input_file_id")
_STATELESS = ("completions", "embeddings", "messages", "chat", "generate", "embed", "classify", "rerank")
"""The last parts of paths whose answers are not stored by default."""


@dataclass(slots=True)
class RequestFacts:
    """One request."""

    model: str = ""  # empty if the request has none, or could not be read
    run: TokenRun | None = None  # the prompt; None: the request has none
    cache_salt: str = ""  # prompts with different salts share no cache
    caller: Caller = ANYONE
    program: str = ""
    objective: Objective = "latency"
    names: tuple[str, ...] = ()  # the ids of stored objects that the request refers to
    stores: bool = False  # the answer may have the id of a new stored object


def read_asked(
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    query: str = "",
    *,
    is_whole: bool = True,
) -> RequestFacts:
    """Reads a request. The gateway accepts every request: its target checks it.

    Args:
        method: Such as ``POST``.
        path: Without the query, as it was sent.
        headers: With names in lower case.
        body: Empty if there is none.
        query: Of the address. A request for a ticket has the session or the model there, like the websocket.
        is_whole: Whether the body is complete. Otherwise, it is the beginning of a large one.
    """
    asked = RequestFacts(caller=_caller(headers))
    parts = [unquote(part)[:MAX_NAME_CHARS] for part in path.split("/") if part]
    if "models" in parts[:-1]:
        asked.model = "/".join(parts[parts.index("models") + 1 :])
    else:
        asked.names = tuple(part for part in parts[2:] if any(map(str.isdigit, part)))
    if parts[-1:] == ["session-ticket"]:
        asked.names += tuple(name[:MAX_NAME_CHARS] for name in parse_qs(query).get(SESSION_PARAM, [])[:1])
        asked.model = model_in(query)
    if method == "POST":
        asked.stores = not parts or parts[-1] not in _STATELESS
        if body:
            _read_body(asked, _decoded(body, is_whole=is_whole))
    asked.program = asked.caller.program or asked.program
    return asked


def model_in(query: str) -> str:
    """The model in the address of a websocket, or of a request for a ticket; empty if it has none. The last
    one: clients append it to the query of an address."""
    return parse_qs(query).get(MODEL_PARAM, [""])[-1][:MAX_NAME_CHARS]


def _caller(headers: Mapping[str, str]) -> Caller:
    try:
        return Caller.of(headers, "")
    except ApiError:  # an unknown objective
        return ANYONE


def _read_body(asked: RequestFacts, fields: Any) -> None:
    if not isinstance(fields, dict):
        return
    asked.model = _text(fields.get("model")) or asked.model
    asked.cache_salt = _text(fields.get("cache_salt"))
    asked.program = _text(fields.get("prompt_cache_key"))
    asked.objective = asked.caller.objective or (
        "throughput" if fields.get("service_tier") == "flex" else "latency"
    )
    if isinstance(store := fields.get("store"), bool):
        asked.stores = store
    for name in _REFERENCES:
        value = fields.get(name)
        found = _text(value.get("id") if isinstance(value, dict) else value)
        if found:
            asked.names = (*asked.names, found)
    if isinstance(fields.get("nvext"), dict):
        asked.caller = caller_with(asked.caller, msgspec.Raw(msgspec.json.encode(fields["nvext"])))
    pieces, size = [], 0
    for piece in _prompt(fields):
        pieces.append(piece)
        size += len(piece)
        if size >= MAX_RUN_BYTES:
            break
    if pieces:
        asked.run = text_run(b"".join(pieces))


def _decoded(body: bytes, *, is_whole: bool) -> Any:
    scan = JsonScan(BODY_BOUNDS)
    try:
        for start in range(0, len(body), PIECE_BYTES):
            scan.push(body[start : start + PIECE_BYTES])
        return msgspec.json.decode(body) if is_whole else jiter.from_json(body, partial_mode=True)
    except (*UNREADABLE, TooMuchJson, ValueError):
        return None


def _text(value: object) -> str:
    return value[:MAX_NAME_CHARS] if isinstance(value, str) else ""


def _prompt(fields: Mapping[str, Any]) -> Iterator[bytes]:
    for name in _FIELDS:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, list):
            for item in value:
                yield from _item(item)
        else:
            yield from _item(value)


def _item(item: Any) -> Iterator[bytes]:
    """A message, a tool, a prompt, or a token."""
    if isinstance(item, dict) and "role" in item:
        yield b"\n<%b>\n" % _text(item["role"]).encode("utf-8", "replace")
        content = item.get("content")
        for part in content if isinstance(content, list) else [content]:
            yield from _part(part)
        rest = {name: value for name, value in item.items() if name not in ("role", "content", "id")}
        if rest:
            yield _encoded(rest)
    else:
        yield from _part(item)


def _part(part: Any) -> Iterator[bytes]:
    if isinstance(part, str):
        yield _blob(part) if _is_blob(part) else part.encode("utf-8", "replace")
    elif isinstance(part, dict) and isinstance(part.get("text"), str):
        yield part["text"].encode("utf-8", "replace")
    elif part is not None:
        yield _encoded(part)


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(_without_blobs(value), order="deterministic")


def _without_blobs(value: Any) -> Any:
    """Replaces images and other files, which are many bytes and few tokens, by digests."""
    if isinstance(value, dict):
        return {name: _without_blobs(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_blobs(inner) for inner in value]
    return _blob(value).decode() if isinstance(value, str) and _is_blob(value) else value


def _is_blob(text: str) -> bool:
    return len(text) >= BLOB_CHARS and _BLOB.match(text) is not None


def _blob(text: str) -> bytes:
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest().encode()
    return digest * (_BLOB_BYTES // len(digest))
