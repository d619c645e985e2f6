"""Bodies of megabytes: those with too many values are refused before they are decoded, others are processed
in threads, and all are charged to their sender."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import msgspec
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER, FakeEngine
from support.faulty_servers import KEY, tenants
from support.server.apis import CHAT, MESSAGES, TEXT, Api, post, refused
from support.server.exchanges import Exchange, exchange, service
from support.server.module_servers import module_server

from agentflow.engine.generator.context import PIECE_CHARS
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.tenant import Tenant
from agentflow.errors import Overloaded
from agentflow.protocol.bounds.json_bounds import BODY_BOUNDS, OBJECT_BOUNDS, PIECE_BYTES
from agentflow.server.completion.engine_run import COUNTED_CONTEXTS
from agentflow.server.errors import ApiError
from agentflow.server.http.call import ApiCall
from agentflow.server.http.json_body import SMALL_BODY_BYTES
from agentflow.server.openai.types import ChatRequest
from agentflow.server.tenants.rate_limit import BYTES_PER_TOKEN, MINUTE_NS, TenantGate

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "Hi"}
DEEP: Any = []
for _ in range(180):
    DEEP = [DEEP]


server = module_server(constraints=False)


def asked(server: ApiServer, api: Api, path: str = "", key: str = "any", **body: Any) -> httpx2.Response:
    return post(server, api, {"model": MODEL, **body}, key=key, path=path)


def form(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def called(arguments: str, count: int = 1) -> list[dict[str, Any]]:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for n in range(count)
    ]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": ""} for n in range(count)]
    return [USER, {"role": "assistant", "tool_calls": calls}, *results]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": called("{}", BODY_BOUNDS.parts // 10)},
        {"messages": [USER], "metadata": {str(n): "" for n in range(BODY_BOUNDS.parts)}},
        {"messages": [USER], "prediction": [[]] * BODY_BOUNDS.parts},
        {"messages": [USER], "stop_token_ids": [1] * (BODY_BOUNDS.values + 1)},
        {"messages": [USER], "no such field": [1] * (BODY_BOUNDS.values + 1)},
        {"messages": [{"role": "user", "content": "\n" * ((BODY_BOUNDS.escapes or 0) + 1)}]},
        {"messages": [USER], "response_format": form({"enum": [DEEP] * 1000})},
    ],
    ids=["calls", "metadata", "unread", "numbers", "unknown", "escapes", "schema"],
)
def test_a_body_of_too_many_values_is_refused(server: ApiServer, body: dict[str, Any]) -> None:
    assert refused(server, CHAT, {"model": MODEL, **body}) == (413, "request_too_large", None)


@pytest.mark.parametrize(
    ("start", "part", "num_pieces"),
    [(b'{"word": "a", "unread": [', b"[],", 100), (b'{"word": "', "€".encode(), 230)],
    ids=["lists", "wide"],
)
async def test_such_a_body_is_refused_before_all_of_it_was_read(
    start: bytes, part: bytes, num_pieces: int
) -> None:
    pieces = [part * (PIECE_BYTES // 3)] * num_pieces
    client = Exchange(start, *pieces)
    await exchange(_never, client)
    assert (client.status, client.error["code"]) == (413, "request_too_large")
    assert len(client._messages) > 90


async def _never(call: ApiCall) -> None:
    raise AssertionError("the body was read")


ENUM: list[Any] = [[]] * (OBJECT_BOUNDS.parts * 2 // 5)  # three of them are too many
FAR: Any = [[]] * 60_000
INPUT = {"type": "tool_use", "id": "a", "name": "f", "input": {"a": FAR}}
TITLE = {"title": "a" * 1_500_000}


def tools(parameters: Any, count: int = 4) -> Any:
    return [{"name": f"f{number}", "parameters": parameters} for number in range(count)]


@pytest.mark.parametrize(
    ("api", "body", "param"),
    [
        (CHAT, CHAT.body("Hi", tools=tools({"enum": ENUM})), "tools[2].function.parameters"),
        (CHAT, CHAT.body("Hi", tools=tools(TITLE)), "tools[2].function.parameters"),  # f44b
        (CHAT, CHAT.body("Hi", extra={"response_format": form(TITLE)}), "response_format"),
        (MESSAGES, MESSAGES.body("Hi", tools=tools({"enum": FAR}, 1)), "tools[0].input_schema"),
        (
            MESSAGES,
            MESSAGES.body([USER, {"role": "assistant", "content": [INPUT]}]),
            "messages[1].content[0].input",
        ),
    ],
    ids=["tools", "f44b_large_tools", "schema", "input_schema", "input"],
)
def test_a_value_that_holds_too_much_is_named(server: ApiServer, api: Api, body: Any, param: str) -> None:
    assert refused(server, api, body) == (400, "invalid_value", param)


@pytest.mark.parametrize("api", [CHAT, MESSAGES], ids=lambda api: api.name)
def test_large_bodies_are_decoded_beside_the_event_loop(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, api: Api
) -> None:
    threads: list[int] = []
    decode = ApiCall.read

    def read(call: ApiCall, body_type: type[Any]) -> Any:
        threads.append(threading.get_ident())
        return decode(call, body_type)

    monkeypatch.setattr(ApiCall, "read", read)
    loop = server.call(threading.get_ident)
    for length, is_beside in ((10, False), (SMALL_BODY_BYTES, True)):
        threads.clear()
        post(server, api, api.body("x" * length, max_tokens=1))
        assert threads
        assert all((thread != loop) == is_beside for thread in threads)


SPELLINGS: dict[str, tuple[bytes, int]] = {
    "plain": (b"", 200),
    "unknown nulls": (b"," + b",".join(b'"new%d": null' % number for number in range(20)), 200),
    "whole number": (b', "priority": 1.0', 200),
    "fraction": (b', "priority": 1.5', 400),
    "unknown": (b', "new": null, "another": 0', 400),
    "half a pair": (b', "user": "\\ud800"', 400),
    "truncated": (b', "user": "a', 400),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("api", [CHAT, MESSAGES], ids=lambda api: api.name)
def test_f37_a_body_has_the_same_answer_at_any_size(server: ApiServer, api: Api, spelling: str) -> None:
    """A small body is decoded in the event loop, a large one in a thread."""
    member, status = SPELLINGS[spelling]
    plain = msgspec.json.encode(api.body("Hi", max_tokens=4, temperature=0))
    found = []
    for num_spaces in (0, SMALL_BODY_BYTES, 1_100_000):
        body = plain[:-1] + b" " * num_spaces + member + (b"" if spelling == "truncated" else b"}")
        response = httpx2.post(f"{server.url}{api.path}", content=body, timeout=60)
        assert response.status_code == status, response.text
        shown = response.json()
        found.append(api.error(shown) if status == 400 else (api.whole(shown).text, api.whole(shown).reason))
    assert found == [found[0]] * 3


def test_a_conversation_of_many_calls_is_laid_out_beside_the_event_loop(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentflow.engine.generator import context

    threads: list[int] = []
    use = context.tool_use

    def tool_use(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return use(*arguments)

    monkeypatch.setattr(context, "tool_use", tool_use)
    post(server, CHAT, CHAT.body(called("{}", 500), max_tokens=1))
    assert threads
    assert server.call(threading.get_ident) not in threads


def test_a_text_far_too_long_is_encoded_no_further_than_that_shows(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    tokenizer = server.generator.tokenizer
    encode = tokenizer.encode_markup

    def encode_markup(text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode_markup", encode_markup)
    # Each character is a token or two; the context has 1,024, which a token of 25 bytes does not rule out.
    text = "xy " * 8_000
    assert len(text) <= PIECE_CHARS
    for path, extra in (
        ("/v1/completions", {}),
        ("/tokenize", {}),
        ("/tokenize", {"add_special_tokens": False}),
    ):
        encoded.clear()
        body = {"model": MODEL, "prompt": text, **extra}
        assert refused(server, TEXT, body, path=path)[:2] == (400, "context_length_exceeded")
        assert encoded == [len(text)]
    longest = 4 * COUNTED_CONTEXTS * 1024
    assert asked(server, CHAT, "/tokenize", prompt="xy" * (longest // 4)).json()["count"] > 1024


LONG_CONTEXT = 4_000


@pytest.fixture(scope="module")
def long_server() -> Iterator[ApiServer]:
    runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, max_context=LONG_CONTEXT)
    with api_server(FakeEngine(runner=runner), constraints=False) as running:
        yield running


@pytest.mark.parametrize(("path", "extra"), [("/v1/chat/completions", {"max_tokens": 1}), ("/tokenize", {})])
def test_calls_that_are_rendered_far_too_long_are_encoded_in_pieces(
    long_server: ApiServer, monkeypatch: pytest.MonkeyPatch, path: str, extra: dict[str, Any]
) -> None:
    lengths: list[int] = []
    tokenizer = long_server.generator.tokenizer
    encode = tokenizer._encoding

    def encoding(whole: Any, text: str) -> Any:
        lengths.append(len(text))
        return encode(whole, text)

    monkeypatch.setattr(tokenizer, "_encoding", encoding)
    [user, calling, *_] = called("{}", 1_500)  # their arguments have fewer characters than the context tokens
    body = {"model": MODEL, "messages": [user, calling], **extra}
    assert refused(long_server, CHAT, body, path=path)[:2] == (400, "context_length_exceeded")
    assert max(lengths) == PIECE_CHARS
    assert sum(lengths) < 2 * PIECE_CHARS


def test_a_conversation_longer_than_the_context_can_be_tokenized(long_server: ApiServer) -> None:
    [user, calling, *_] = called("{}", 150)
    num_tokens = asked(long_server, CHAT, "/tokenize", messages=[user, calling]).json()["count"]
    assert LONG_CONTEXT < num_tokens < COUNTED_CONTEXTS * LONG_CONTEXT


def gate_of(tokens_per_minute: int) -> tuple[TenantGate, Tenant]:
    return TenantGate(lambda: MINUTE_NS), Tenant(KEY, tokens_per_minute=tokens_per_minute)


BODY = b'{"word": "' + b"a" * 1_000_000 + b'"}'
COST = len(BODY) // BYTES_PER_TOKEN


@pytest.mark.parametrize("announces", [True, False])
@pytest.mark.parametrize(
    ("error", "prompt_tokens", "cost"),
    [
        (None, 10, COST - 10),
        (None, 10**9, 0),
        (ValueError(), 10, 0),
        (Overloaded("later"), 0, 0),
    ],
    ids=["short prompt", "long prompt", "internal", "overloaded"],
)
async def test_a_large_body_is_charged_beyond_its_prompt(
    announces: bool, error: Exception | None, prompt_tokens: int, cost: int
) -> None:
    gate, tenant = gate_of(COST + 1)

    async def answer(call: ApiCall) -> None:
        call.tenant = tenant
        call._is_prompt_charged = True
        call.record.prompt_tokens = prompt_tokens
        if error is not None:
            raise error
        await call.reply({})

    await sent(answer, gate, tenant, announces=announces)
    gate.charge(tenant, COST - cost)
    gate.check_buckets(tenant)  # one is left
    gate.charge(tenant, 1)
    with pytest.raises(Overloaded):
        gate.check_buckets(tenant)


async def test_a_large_body_that_is_refused_stays_charged() -> None:
    gate, tenant = gate_of(COST)

    async def answer(call: ApiCall) -> None:
        call.read(ChatRequest)

    assert (await sent(answer, gate, tenant)).status == 400
    client = await sent(_never, gate, tenant)
    assert (client.status, client.error["code"]) == (429, "rate_limit_exceeded")
    assert len(client._messages) == 2  # none of it was read


async def sent(handler: Any, gate: TenantGate, tenant: Tenant, *, announces: bool = True) -> Exchange:
    headers = {"content-length": str(len(BODY))} if announces else {}
    client = Exchange(BODY[:500_000], BODY[500_000:], headers=headers)
    async with service() as running:
        running.models.gate = gate
        running.tenants.of_request = lambda *_: tenant
        await exchange(handler, client, running)
    return client


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("rejects", [True, False])
async def test_a_body_is_released_without_a_garbage_collection(rejects: bool) -> None:
    gate, tenant = gate_of(COST + 1)
    bodies: list[weakref.ref[Decoded]] = []

    def check(body: Decoded) -> None:
        if rejects:
            raise ApiError(400, "invalid_value", "this word is not allowed")

    async def answer(call: ApiCall) -> None:
        body = call.read(Decoded)
        bodies.append(weakref.ref(body))
        await call.process(check, body)
        await call.reply({})

    client = await sent(answer, gate, tenant)
    assert client.status == (400 if rejects else 200)
    assert len(bodies) == 1
    with anyio.fail_after(10):
        while bodies[0]() is not None:  # the worker thread drops its reference after it has returned
            await anyio.lowlevel.checkpoint()


class Decoded(msgspec.Struct, weakref=True):
    word: str


async def test_text_that_is_not_utf8_is_rejected_wherever_it_is_cut() -> None:
    for word, status in (("é€😀".encode(), 200), (b"\xe2\x82", 400), (b"a\xff", 400), (b"\xed\xa0\x80", 400)):
        data = b'{"word": "a", "unread": "' + word + b'"}'
        for cut in range(len(data)):
            client = Exchange(data[:cut], data[cut:])
            await exchange(_read_word, client)
            assert client.status == status, (word, cut)


async def _read_word(call: ApiCall) -> None:
    call.read(Decoded)
    await call.reply({})


def test_a_count_costs_a_request() -> None:
    counts: list[tuple[Api, str, Any]] = [
        (CHAT, "/tokenize", {"prompt": "Hi"}),
        (CHAT, "/detokenize", {"tokens": [1]}),
        (MESSAGES, "/v1/messages/count_tokens", {"messages": [USER]}),
    ]
    known = tenants("requests_per_minute = 3")
    with api_server(tenants=known, gate=TenantGate(), constraints=False) as server:
        for api, path, body in counts:
            assert asked(server, api, path, KEY, **body).status_code == 200
        for api, path, body in counts:
            found = refused(server, api, {"model": MODEL, **body}, key=KEY, path=path)
            assert found[:2] == (429, "rate_limit_exceeded")
