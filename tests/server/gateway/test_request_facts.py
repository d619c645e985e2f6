"""The facts that the gateway reads from requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.backends.remote import Remote
from agentflow.cluster.routing.text_router import MAX_RUN_BYTES
from agentflow.server.gateway.request_facts import RequestFacts, model_in, read_asked

CHAT = "/v1/chat/completions"
TURNS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=30)), min_size=1, max_size=4
)


def asked(
    body: Any, path: str = CHAT, headers: dict[str, str] | None = None, method: str = "POST"
) -> RequestFacts:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_asked(method, path, headers or {}, data)


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


@given(TURNS, TURNS, st.sampled_from(["messages", "input"]))
def test_a_longer_conversation_begins_with_the_shorter_one(
    turns: list[tuple[str, str]], more: list[tuple[str, str]], field: str
) -> None:
    body = {"model": "m", "tools": [{"type": "function", "function": {"name": "f"}}], "temperature": 1}
    short = asked(body | {field: messages(turns)}).run
    longer = asked(body | {field: messages(turns + more), "temperature": 0}).run
    assert short is not None
    assert longer is not None
    whole = len(short.rstrip(b" ")) // 4 * 4
    assert longer[:whole] == short[:whole]


@given(TURNS)
def test_the_form_of_the_json_does_not_matter(turns: list[tuple[str, str]]) -> None:
    plain = {"model": "m", "messages": messages(turns)}
    parts = [{"content": [{"type": "text", "text": text}], "role": role} for role, text in turns]
    forms = [
        json.dumps(plain, indent=3).encode(),
        json.dumps(plain, ensure_ascii=False).encode("utf-8", "surrogatepass"),
        json.dumps({"messages": parts, "model": "m"}).encode(),
    ]
    assert len({asked(form).run for form in forms}) == 1


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/completions", {"prompt": "abcd"}, b"abcd"),
        ("/v1/completions", {"prompt": [1, 2, 3, 4]}, b"1234"),
        ("/v1/embeddings", {"input": ["ab", "cd"]}, b"abcd"),
        ("/v1/responses", {"instructions": "be", "input": "nice"}, b"benice  "),
        ("/v1/messages", {"system": [{"type": "text", "text": "s"}], "messages": []}, b"s   "),
        ("/api/generate", {"system": "s", "prompt": "p"}, b"sp  "),
        ("/generate", {"text": "abcd"}, b"abcd"),
    ],
)
def test_prompts_of_all_apis(path: str, body: dict[str, Any], text: bytes) -> None:
    assert asked(body, path).run == text


def test_images_count_by_their_digest() -> None:
    def with_image(data: str) -> RequestFacts:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return asked({"messages": [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}]})

    first, same, other = with_image("A" * 100_000), with_image("A" * 100_000), with_image("B" * 100_000)
    assert first.run is not None
    assert len(first.run) < 10_000
    assert (first.run == same.run, first.run == other.run) == (True, False)
    for prose in ("A long sentence without an end. " * 400, "一个没有空格的长句子。" * 400):
        assert len(asked({"prompt": prose}).run or b"") == len(prose.encode())


def test_the_hints_of_a_request() -> None:
    headers = {
        "x-agentflow-program": "p",
        "x-agentflow-group": "g",
        "x-agentflow-objective": "throughput",
    }
    got = asked({"model": "m", "prompt": "x", "cache_salt": "s", "prompt_cache_key": "k"}, headers=headers)
    assert (got.program, got.caller.group, got.objective) == ("p", "g", "throughput")
    assert (got.model, got.cache_salt) == ("m", "s")
    got = asked({"prompt": "x", "prompt_cache_key": "k", "nvext": {"agent_hints": {"osl": 9}}})
    assert (got.program, got.caller.output_tokens, got.objective) == ("k", 9, "latency")
    assert asked({"prompt": "x"}, headers={"x-agentflow-objective": "unknown"}).objective == "latency"


@pytest.mark.parametrize(
    ("method", "path", "body", "names", "stores"),
    [
        ("GET", "/v1/responses/resp_1a/input_items", b"", ("resp_1a",), False),
        (
            "POST",
            "/v1/responses",
            {"previous_response_id": "r1", "conversation": {"id": "c2"}},
            ("r1", "c2"),
            True,
        ),
        ("POST", "/v1/responses", {"conversation": "c3", "previous_response_id": None}, ("c3",), True),
        ("POST", CHAT, {"messages": []}, (), False),
        ("POST", CHAT, {"messages": [], "store": True}, (), True),
        ("POST", "/v1/responses", {"input": "x", "store": None}, (), True),
        ("POST", "/v1/responses", {"input": "x", "store": False}, (), False),
        ("POST", "/v1/batches", {"input_file_id": "file-1"}, ("file-1",), True),
        ("GET", "/v1/files/a%20b9/content", b"", ("a b9",), False),
    ],
)
def test_stored_things(method: str, path: str, body: Any, names: tuple[str, ...], stores: bool) -> None:
    got = asked(body, path, method=method)
    assert (got.names, got.stores) == (names, stores)


def test_the_model_of_an_address() -> None:
    assert asked(b"", "/v1/models/owner/name%3Atag", method="GET").model == "owner/name:tag"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b"[" * 100_000,
        b'{"messages": 3, "model": 4, "nvext": [], "previous_response_id": {}}',
        b'{"messages": [null, 1, [[]], {"role": 3}], "tools": {"a": [1]}}',
        b'{"prompt": [' + b"[]," * 400_000 + b"[]]}",
    ],
)
def test_bodies_that_make_no_sense_are_for_the_target(body: bytes) -> None:
    got = asked(body)
    assert (got.model, got.names) == ("", ())


def test_a_long_prompt_is_cut() -> None:
    got = asked({"model": "m", "messages": messages([("user", "words and " * 400_000)])})
    assert len(got.run or b"") == MAX_RUN_BYTES


def test_names_are_bounded() -> None:
    got = asked({"model": "m" * 10_000, "prompt": "x", "prompt_cache_key": "k" * 10_000})
    assert (len(got.model), len(got.program)) == (256, 256)


def test_f37_a_ticket_that_resumes_a_session_names_it() -> None:
    path = "/v1/session-ticket"
    assert read_asked("POST", path, {}, b"", "session=s%2F1&session=s2").names == ("s/1",)
    assert read_asked("POST", path, {}, b"").names == ()
    assert read_asked("POST", CHAT, {}, b"", "session=s1").names == ()


def test_f37_the_model_that_a_client_adds_to_an_address_counts() -> None:
    address = Remote("ws://here/v1/session?model=a&x=1", model="b:latest")._address(None)
    assert model_in(address.query) == "b:latest"
    assert [model_in(query) for query in ("model=a%2Fb", "x=1", "")] == ["a/b", "", ""]
