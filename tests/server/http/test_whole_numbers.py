"""Whole numbers that a client writes as floats, in the integer fields of every API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api_server import MODEL, ApiServer
from support.server.openai_peer import logit_server

from agentflow.server.errors import ApiError
from agentflow.server.http.call import decoded

SAYS = [{"role": "user", "content": "What do plants do?"}]

server = pytest.fixture(logit_server, scope="module")


class Called(msgspec.Struct, tag_field="kind", tag="called", forbid_unknown_fields=True):
    given: msgspec.Raw
    index: int | None = None


class Said(msgspec.Struct, tag_field="kind", tag="said", forbid_unknown_fields=True):
    text: str
    ids: list[int] = []


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """Every shape in which the requests of the APIs hold integers."""

    limit: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)] | None = None
    off: Literal[0] | None = None
    share: float | None = None
    either: int | float | None = None
    prompt: str | list[str | int | list[int]] = ""
    counts: dict[str, int] = {}
    turns: list[Called | Said] = []
    raw: msgspec.Raw = msgspec.Raw(b"null")


NUMBERS = st.integers(-(2**53), 2**53)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=5) | st.sampled_from(["1.0", 'say "2.0"', "3e0"])
UNREAD = st.sampled_from([b'{"x":1.0}', b"[2.0,3]", b'"4.0"', b"5.0"])
CALLED = st.fixed_dictionaries({"kind": st.just("called"), "given": UNREAD}, optional={"index": NUMBERS})
SAID = st.fixed_dictionaries({"kind": st.just("said"), "text": TEXTS}, optional={"ids": st.lists(NUMBERS)})
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "limit": st.none() | NUMBERS,
        "off": st.just(0),
        "share": st.floats(-1, 1),
        "either": NUMBERS,
        "prompt": TEXTS | st.lists(TEXTS) | st.lists(NUMBERS) | st.lists(st.lists(NUMBERS)),
        "counts": st.dictionaries(TEXTS, NUMBERS),
        "turns": st.lists(CALLED | SAID, max_size=3),
        "raw": UNREAD,
    },
)


def written(value: Any, write: Any) -> str:
    """The value as JSON, its integers by ``write``."""
    match value:
        case dict():
            members = [f" {written(name, write)} : {written(inner, write)}" for name, inner in value.items()]
            return "{" + ",".join(members) + " }"
        case list():
            return "[" + " , ".join(written(inner, write) for inner in value) + "]"
        case bytes():
            return value.decode()
        case int():
            return str(write(value))
        case _:
            return msgspec.json.encode(value).decode()


FORMS = ("{}", "{}.0", "{}.000", "{}e0", "{}.0E+0")


@given(BODIES, st.data())
def test_f34a_a_whole_number_is_an_integer_in_every_spelling(body, data):
    def spelled(number: int) -> str:
        return data.draw(st.sampled_from(FORMS)).format(number)

    plain = decoded(written(body, str).encode(), Asked)
    read = decoded(written(body, spelled).encode(), Asked)
    assert shown(read) == shown(plain)


def shown(value: Any) -> Any:
    """All fields, with the text of those that are read later, which stays unchanged."""
    match value:
        case msgspec.Raw():
            return bytes(value)
        case msgspec.Struct():
            return type(value), [shown(getattr(value, name)) for name in value.__struct_fields__]
        case list():
            return [shown(inner) for inner in value]
        case _:
            return value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"limit": 8192.5}', "limit"),
        ('{"limit": 1e400}', "limit"),
        ('{"off": 1.0}', "off"),
        ('{"limit": 1.0, "prompt": [1.5]}', "prompt[0]"),
        ('{"limit": 1.0, "counts": {"a": "1.0"}}', "counts[...]"),
        ('{"limit": 1.0, "nothing": 2.0}', "nothing"),
        ('{"limit": 9007199254740994.0}', "limit"),
    ],
)
def test_f34a_other_numbers_are_rejected_with_their_field(body, param):
    with pytest.raises(ApiError) as caught:
        decoded(body.encode(), Asked)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": SAYS, "max_tokens": 3.0, "top_k": -1.0, "seed": 4.0, "n": 1.0}),
        ("/v1/completions", {"prompt": [1.0, 2.0], "max_tokens": 3.0, "logprobs": 2.0, "min_tokens": 0.0}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16.0, "top_logprobs": 0.0, "store": False}),
        (
            "/v1/messages",
            {"messages": SAYS, "max_tokens": 3.0, "thinking": {"type": "disabled", "budget_tokens": 1024.0}},
        ),
        (
            "/api/chat",
            {"messages": SAYS, "stream": False, "options": {"num_ctx": 8192.0, "num_predict": 3.0}},
        ),
        ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 3.0, "top_k": 5.0}}),
        ("/tokenize", {"prompt": "Hi", "add_special_tokens": True}),
        ("/detokenize", {"tokens": [1.0, 2.0]}),
    ],
)
def test_f34a_every_api_takes_whole_numbers_written_as_floats(server: ApiServer, path: str, body: dict):
    answer = httpx2.post(f"{server.url}{path}", json={"model": MODEL, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
