"""Images in the results of tools."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from support.apis import openai_answers
from support.apis.fake_server import fake_server
from support.observed_backends import Observed

import agentflow as af
from agentflow.backends.apis.openai import OpenAI
from agentflow.language.agents.tool_content import ToolContent, content_of_result, read_content
from agentflow.protocol import ops
from agentflow.protocol.events import Capabilities
from agentflow.protocol.images import Image, image_file, known_file

pytestmark = pytest.mark.anyio

DATA = b"\x89PNG\r\n\x1a\n of a tool"
URL = {"type": "image_url", "image_url": {"url": image_file(DATA).url}}


def script() -> list[Any]:
    return [af.ToolCall("screenshot", {}, id="call_1"), "A cat."]


async def looked(backend: Any, result: Any, **options: Any) -> tuple[str, list[Any], list[Any]]:
    """The answer, the events and the messages of an agent whose tool returns ``result``."""

    def screenshot() -> Any:
        """The screen."""
        return result

    async with af.session(backend=backend, **options) as flow, flow.state() as s:
        s += af.user("What is on the screen?")
        act = af.act(s, tools=[screenshot])
        events: list[Any] = [event async for event in act]
        return events[-1].result, events, await s.messages()


@pytest.mark.parametrize(
    ("parts", "content"),
    [
        ([af.image(DATA)], [URL]),
        (["The screen: ", af.image(DATA)], [{"type": "text", "text": "The screen: "}, URL]),
        ([{"width": 3}, af.image(DATA)], [{"type": "text", "text": '{"width": 3}'}, URL]),
    ],
)
async def test_a_tool_may_return_images(parts: list[Any], content: list[Any]) -> None:
    backend = af.Scripted(script())
    answer, events, messages = await looked(backend, parts if len(parts) > 1 else parts[0])
    assert answer == "A cat."
    assert messages[2]["content"] == content
    assert backend.calls[1].messages == messages[:3]
    (done,) = [event for event in events if isinstance(event, af.ToolDone)]
    assert done.text.endswith("[image]")
    assert not done.failed


async def test_a_picture_of_pillow_is_an_image() -> None:
    pillow = pytest.importorskip("PIL.Image")
    _, _, messages = await looked(af.Scripted(script()), pillow.new("RGB", (2, 2)))
    assert messages[2]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


async def test_a_replay_has_the_images_of_the_tools(tmp_path: Path) -> None:
    data = DATA + b" that is recorded"
    path = tmp_path / "run.jsonl"
    first = await looked(af.Scripted(script()), ["Look: ", af.image(data)], record=path)
    gc.collect()
    again = await looked(af.Replay(path), "not called")
    assert (again[0], again[2]) == (first[0], first[2])
    shown = [[event for event in events if isinstance(event, af.ToolDone)] for _, events, _ in (first, again)]
    assert shown[0] == shown[1] != []


async def test_a_model_without_vision_is_told_what_is_missing() -> None:
    backend = af.Scripted(script())
    backend.generator.capabilities = Capabilities(
        "reader", conversations=True, constraints=backend.generator.capabilities.constraints
    )
    observed = Observed(backend)
    answer, _, messages = await looked(observed, ["A: ", af.image(DATA)])
    assert answer == "A cat."
    assert isinstance(messages[2]["content"], str)
    assert "reader" in messages[2]["content"]
    assert not observed.of(ops.Image)


async def test_the_chat_api_shows_the_images_of_tools_after_their_results() -> None:
    calls = [("call_1", "screenshot", "{}"), ("call_2", "screenshot", "{}")]
    answers = [openai_answers.call_stream(*calls), openai_answers.text_stream("A cat.")]
    async with fake_server(answers) as server:
        backend = OpenAI("gpt-4o", base_url=f"{server.url}/v1", api_key="sk-1", api="chat", max_retries=0)
        answer, _, _ = await looked(backend, ["The screen: ", af.image(DATA)])
    assert answer == "A cat."
    sent = server.last.json["messages"][2:]
    assert [message["role"] for message in sent] == ["tool", "tool", "user"]
    assert [message["content"] for message in sent[:2]] == ["The screen: [image 1]"] * 2
    assert [part for part in sent[2]["content"] if part["type"] == "image_url"] == [URL, URL]


@pytest.mark.parametrize(
    "text", ["plain", "agentflow-parts:[]", 'agentflow-parts:[{"image":"sha256:x"}]', ""]
)
def test_a_text_is_read_as_it_was_returned(text: str) -> None:
    content = content_of_result(text)
    assert read_content(content.value, Image).parts == (text,)
    assert read_content(content.value, Image).text == text


def test_parts_that_are_no_parts_are_a_damaged_recording() -> None:
    with pytest.raises(af.errors.BadRecording):
        read_content("agentflow-parts:{", Image)


def test_a_result_with_images_is_read_as_it_was_returned() -> None:
    content = content_of_result(("a", af.image(DATA), "b"))
    found = read_content(content.value, lambda source: known_file(source) or Image(source))
    assert [str(part) if isinstance(part, str) else part.file.data for part in found.parts] == [
        "a",
        DATA,
        "b",
    ]
    assert content.for_model(Capabilities("m", images=True)).parts == content.parts
    assert isinstance(content, ToolContent)
    with pytest.raises(af.errors.BadArgument):
        content_of_result(af.image(f"https://example.org/{af.image(DATA)}.png"))
