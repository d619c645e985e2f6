"""Images in requests of each HTTP API, for a served model behind an API."""

from __future__ import annotations

import base64
from typing import Any

import httpx2
import pytest
from support.apis.fake_server import Received
from support.apis.openai_answers import text_stream
from support.server.api_models import served_apis
from support.server.http_clients import only_asyncio

from agentflow.errors import BadArgument
from agentflow.server.compatible.field_errors import naming_field

pytestmark = pytest.mark.anyio
anyio_backend = pytest.fixture(only_asyncio)

DATA = base64.b64encode(b"\x89PNG\r\n\x1a\n served").decode()
URL = f"data:image/png;base64,{DATA}"
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TEXT = {"type": "text", "text": "What is it? "}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": URL}}]}]},
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "What is it? "},
                        {"type": "input_image", "image_url": URL},
                    ],
                }
            ]
        },
    ),
    # The first bytes of a file decide its type, not the client's media type.
    "chat with a wrong type": (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        TEXT,
                        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{DATA}"}},
                    ],
                }
            ]
        },
    ),
    "messages": ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [TEXT, BLOCK]}]}),
    "ollama": (
        "/api/chat",
        {"stream": False, "messages": [{"role": "user", "content": "What is it? ", "images": [DATA]}]},
    ),
    "ollama text": ("/api/generate", {"stream": False, "prompt": "What is it? ", "images": [DATA]}),
}


def seen(request: Received) -> Any:
    """An answer with the images of the last message."""
    parts = request.json["messages"][-1]["content"]
    return text_stream(" ".join([part["image_url"]["url"] for part in parts if part["type"] == "image_url"]))


async def post(url: str, path: str, body: dict[str, Any], model: str | None = "gpt") -> httpx2.Response:
    given = body if model is None else {"model": model, **body}
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        return await client.post(path, json=given)


@pytest.mark.parametrize("api", REQUESTS)
async def test_the_model_is_shown_the_image(api: str) -> None:
    path, body = REQUESTS[api]
    async with served_apis(seen) as served:
        answer = await post(served.url, path, body)
    assert answer.status_code == 200, answer.text
    assert URL in answer.text
    text = [part for part in served.vendor.last.json["messages"][-1]["content"] if part["type"] == "text"]
    assert text == [TEXT]


WRONG: dict[str, tuple[str, str, dict[str, Any]]] = {
    "no base64": ("messages[0].content[0].image_url.url", "data:image/png;base64,%%", {}),
    "no image": ("messages[0].content[0].image_url.url", "data:image/png;base64,AAAA", {}),
    "plain http": ("messages[0].content[0].image_url.url", "http://example.com/a.png", {}),
    "another type": ("messages[0].content[0].image_url.url", f"data:text/plain;base64,{DATA}", {}),
    "a file": ("messages[0].content[0].image_url.url", "file:///etc/passwd", {}),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_request_with_a_wrong_image_is_refused(name: str) -> None:
    param, url, _ = WRONG[name]
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    async with served_apis([]) as served:
        answer = await post(served.url, "/v1/chat/completions", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert not served.vendor.received


@pytest.mark.parametrize("param", ["image", "video"])
def test_an_error_of_a_reader_names_the_field(param: str) -> None:
    error = BadArgument("image: it is damaged", param=param)
    with pytest.raises(BadArgument) as raised, naming_field(Any, "messages"):
        raise error
    assert raised.value.param == "messages"


async def test_the_turns_of_the_assistant_have_no_images() -> None:
    body = {
        "messages": [{"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]
    }
    async with served_apis([]) as served:
        answer = await post(served.url, "/v1/chat/completions", body)
    assert answer.status_code == 400


async def test_a_conversation_object_may_have_images() -> None:
    models = {"gpt": "openai:gpt-4.1-mini", "blind": "vllm:words"}
    shown = [{"type": "input_text", "text": "What is it? "}, {"type": "input_image", "image_url": URL}]
    item = {"type": "message", "role": "user", "content": shown}
    async with served_apis(seen, models) as served:
        made = await post(served.url, "/v1/conversations", {"items": [item]}, None)
        assert made.status_code == 200, made.text
        more = await post(served.url, f"/v1/conversations/{made.json()['id']}/items", {"items": [item]}, None)
        assert more.json()["data"][0]["content"][1]["image_url"] == URL
        asks = {"input": [item], "conversation": made.json()["id"]}
        refused = await post(served.url, "/v1/responses", asks, model="blind")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "conversation")
        answer = await post(served.url, "/v1/responses", asks)
        assert answer.status_code == 200, answer.text
        assert len(served.vendor.last.json["messages"]) == 3
        assert URL in answer.text
        wrong = [{"type": "message", "role": "user", "content": [shown[1] | {"image_url": "file:///a"}]}]
        refused = await post(served.url, "/v1/conversations", {"items": wrong}, None)
        assert refused.json()["error"]["param"] == "items[0].content[0].image_url"


async def test_a_model_without_vision_continues_no_response_with_images() -> None:
    models = {"gpt": "openai:gpt-4.1-mini", "blind": "vllm:words"}
    path, body = REQUESTS["responses"]
    async with served_apis([text_stream("a cat"), text_stream("a dog")], models) as served:
        first = await post(served.url, path, body)
        assert first.status_code == 200, first.text
        follows = {"input": "And now?", "previous_response_id": first.json()["id"]}
        refused = await post(served.url, path, follows, model="blind")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
        async with httpx2.AsyncClient(base_url=served.url) as client:
            items = (await client.get(f"/v1/responses/{first.json()['id']}/input_items")).json()["data"]
        refers = {"input": [{"type": "item_reference", "id": items[0]["id"]}]}
        refused = await post(served.url, path, refers, model="blind")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].id")
        assert (await post(served.url, path, follows)).status_code == 200
