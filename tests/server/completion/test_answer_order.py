"""Answers of all APIs, whole and streamed, from texts, reasoning and calls in any order."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import jiter
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.tool_template_shapes import LLAMA
from support.server.apis import CHAT, MESSAGES, OLLAMA, RESPONSES, Api, ask, events
from support.server.scripted_model import scripted_server

from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import SamplingParams
from agentflow.server.anthropic.answer import AnswerEvents, AnswerFrame
from agentflow.server.completion.request import (
    AnswerEnded,
    AnswerToken,
    CompletionDelta,
    ReasoningDelta,
    TextDelta,
    ToolArguments,
    ToolCallBegun,
    arguments_json,
    join_answers,
    merge_deltas,
)
from agentflow.server.ollama.answer import AnswerLines
from agentflow.server.openai.answer import AnswerIdentity, UsageChunks
from agentflow.server.openai.chat import _ChatChunks, _choice
from agentflow.server.openai.responses.answer import ResponseWriter
from agentflow.server.openai.responses.responses import _begun
from agentflow.server.openai.responses.types import ResponseRequest
from agentflow.server.openai.types import ChatRequest

FRAME = AnswerFrame("msg_1", "fake", max_tokens=50, max_context=100)
HIDDEN = AnswerFrame("msg_1", "fake", max_tokens=50, max_context=100, shows_reasoning=False)
USAGE = Usage(20, 0, 7)


@dataclass
class Part:
    """A text, reasoning, or a call. ``pieces``: the pieces of its text. ``tokens``: the numbers of
    tokens without text before each piece, which log-probabilities have."""

    kind: str
    pieces: list[str]
    tokens: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


PIECES = st.lists(st.text('ab\n"\\', min_size=1, max_size=3), min_size=1, max_size=3)
TOKENS = st.lists(st.integers(0, 2), max_size=3)
OBJECTS = st.dictionaries(st.text("ab", max_size=2), st.integers(0, 9) | st.text(max_size=2), max_size=2)


@st.composite
def _calls(draw: st.DrawFn) -> Part:
    text = json.dumps(draw(OBJECTS))
    cut = draw(st.integers(0, len(text)))
    return Part("call", [text[:cut], text[cut:]], draw(TOKENS))


PARTS = st.lists(
    st.builds(Part, st.sampled_from(["text", "reasoning"]), PIECES, TOKENS) | _calls(), max_size=6
)
CUTS = st.lists(st.integers(0, 50), max_size=4)


def deltas_of(parts: list[Part], *, has_tokens: bool) -> list[CompletionDelta]:
    deltas: list[CompletionDelta] = []
    num_calls = 0
    for part in parts:
        if part.kind == "call":
            deltas.append(ToolCallBegun(0, num_calls, f"call_{num_calls}", "look"))
            num_calls += 1
        for piece, num_tokens in itertools.zip_longest(part.pieces, part.tokens[: len(part.pieces)]):
            if has_tokens and num_tokens:
                deltas.append(TextDelta(0, "", (AnswerToken(5, "t", b"t", -1.0),) * num_tokens))
            match part.kind:
                case "text":
                    deltas.append(TextDelta(0, piece))
                case "reasoning":
                    deltas.append(ReasoningDelta(0, piece))
                case "call":
                    deltas.append(ToolArguments(0, num_calls - 1, piece))
    return [*deltas, AnswerEnded(0, "tool_calls" if num_calls else "stop", USAGE)]


def items_of(parts: list[Part]) -> list[tuple[str, Any]]:
    """The items of an answer: adjacent texts are one, and so are adjacent pieces of reasoning."""
    items: list[tuple[str, Any]] = []
    for part in parts:
        if part.kind == "call":
            items.append(("call", json.loads(part.text)))
        elif items and items[-1][0] == part.kind:
            items[-1] = (part.kind, items[-1][1] + part.text)
        else:
            items.append((part.kind, part.text))
    return items


def streamed(writer: Any, deltas: list[CompletionDelta], cuts: list[int]) -> str:
    """The stream, whose deltas come in batches that end at ``cuts``."""
    places = sorted({0, *[cut % len(deltas) for cut in cuts], len(deltas)})
    written = [writer.start(20)]
    written += [writer.write(merge_deltas(deltas[a:b])) for a, b in itertools.pairwise(places)]
    return b"".join([*written, writer.end(USAGE)]).decode()


def response_writer(*, has_logprobs: bool) -> ResponseWriter:
    asked = msgspec.json.decode(b'{"model": "m", "input": "x"}', type=ResponseRequest)
    return ResponseWriter(_begun("resp_1", asked, "m", SamplingParams()), has_logprobs=has_logprobs)


def response_items(output: list[Any]) -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for item in output:
        if item["type"] == "function_call":
            items.append(("call", json.loads(item["arguments"])))
        else:
            [part] = item["content"]
            items.append(("text" if item["type"] == "message" else "reasoning", part["text"]))
    return items


@given(PARTS, CUTS, st.booleans())
def test_f37_responses_have_each_text_in_an_item(
    parts: list[Part], cuts: list[int], has_tokens: bool
) -> None:
    deltas = deltas_of(parts, has_tokens=has_tokens)
    found = list(events(streamed(response_writer(has_logprobs=has_tokens), deltas, cuts)))
    expected = items_of(parts) or [("text", "")]  # an answer has at least one item
    output = found[-1]["response"]["output"]
    assert response_items(output) == expected
    assert {item["status"] for item in output} == {"completed"}
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    # Each item is added, grows and ends before the next one.
    added: list[str] = []
    texts: list[str] = []
    done: list[Any] = []
    for event in found:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert len(done) == len(added) == event["output_index"]
                added.append(event["item"]["id"])
                texts.append("")
            case "output_item.done":
                done.append(event["item"])
                assert len(done) == len(added) == event["output_index"] + 1
            case kind if kind.endswith(".delta"):
                assert (event["item_id"], event["output_index"]) == (added[-1], len(added) - 1)
                texts[-1] += event["delta"]
    assert response_items(done) == expected
    assert texts == [item.get("arguments") or item["content"][0]["text"] for item in output]
    # Whole: the same writer, which gets all deltas in one batch.
    writer = response_writer(has_logprobs=has_tokens)
    writer.write(merge_deltas(deltas))
    assert response_items(json.loads(msgspec.json.encode(writer.answer))["output"]) == expected
    message = writer.message()
    assert message.content == "".join([text for kind, text in expected if kind == "text"])
    assert (message.reasoning or "") == "".join([text for kind, text in expected if kind == "reasoning"])
    if has_tokens:
        num_logprobs = [len(item["content"][0]["logprobs"]) for item in output if item["type"] == "message"]
        own = sum(sum(part.tokens[: len(part.pieces)]) for part in parts if part.kind == "text")
        assert sum(num_logprobs) >= own  # tokens of a call may precede the tokens of a text


def message_items(content: list[Any]) -> list[tuple[str, Any]]:
    fields = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    kinds = {"text": "text", "thinking": "reasoning", "tool_use": "call"}
    return [(kinds[block["type"]], block[fields[block["type"]]]) for block in content]


@given(PARTS, CUTS, st.booleans())
def test_f37_messages_have_each_text_in_a_block(parts: list[Part], cuts: list[int], is_shown: bool) -> None:
    deltas = deltas_of(parts, has_tokens=False)
    frame = FRAME if is_shown else HIDDEN
    whole = json.loads(msgspec.json.encode(frame.whole(deltas)))["content"]
    expected = items_of(parts)
    if not is_shown:
        expected = [(kind, "" if kind == "reasoning" else content) for kind, content in expected]
    assert message_items(whole) == expected
    blocks: list[Any] = []
    num_over = 0
    for event in events(streamed(AnswerEvents(frame), deltas, cuts)):
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks) == num_over
                blocks.append({**event["content_block"], "written": ""})
            case "content_block_stop":
                num_over += 1
                assert event["index"] == num_over - 1
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1 == num_over
                for name, more in event["delta"].items():
                    if name != "type":
                        name = "written" if name == "partial_json" else name
                        assert name in blocks[-1]
                        blocks[-1][name] += more
    for block in blocks:
        if (written := block.pop("written")) and block["type"] == "tool_use":
            block["input"] = json.loads(written)
    assert blocks == whole  # and the signatures


def _chat_choice(deltas: list[CompletionDelta]) -> Any:
    asked = msgspec.json.decode(
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}', type=ChatRequest
    )
    choice = json.loads(msgspec.json.encode(_choice(0, join_answers(deltas, 1)[0], asked, False)))
    usage = {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens": 7}
    return {"choices": [choice], "usage": usage}


def _answers(api: Api, deltas: list[CompletionDelta], cuts: list[int]) -> list[Any]:
    """The answer whole and streamed."""
    if api is CHAT:
        chunks = _ChatChunks(AnswerIdentity.new("chatcmpl", "m"), 1, usage=UsageChunks(False))
        return [api.whole(_chat_choice(deltas)), api.streamed(streamed(chunks, deltas, cuts))]
    lines = [AnswerLines("m", 0, is_chat=True, has_context=False) for _ in range(2)]
    whole = json.loads(lines[0].whole(join_answers(deltas, 1)[0]))
    return [api.whole(whole), api.streamed(streamed(lines[1], deltas, cuts))]


@pytest.mark.parametrize("api", [CHAT, OLLAMA], ids=lambda api: api.name)
@given(parts=PARTS, cuts=CUTS, has_tokens=st.booleans())
def test_f37_texts_reasoning_and_calls_are_apart(
    api: Api, parts: list[Part], cuts: list[int], has_tokens: bool
) -> None:
    deltas = deltas_of(parts, has_tokens=has_tokens)
    expected = items_of(parts)
    for answer in _answers(api, deltas, cuts):
        assert answer.text == "".join([text for kind, text in expected if kind == "text"])
        assert answer.reasoning == "".join([text for kind, text in expected if kind == "reasoning"])
        assert answer.arguments == [value for kind, value in expected if kind == "call"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", [CHAT, RESPONSES, OLLAMA], ids=lambda api: api.name)
def test_f37_log_probabilities_within_a_call_do_not_end_it(api: Api, stream: bool) -> None:
    """A call without a mark: no constraint holds its tokens back, each is sent with its log-probability."""
    call = '{"name": "find", "parameters": {"tags": ["a", "a"]}}'
    wanted = {"top_logprobs": 1} if api is RESPONSES else {"logprobs": True}
    tools = [{"name": "find", "parameters": {"type": "object", "properties": {"tags": {"type": "array"}}}}]
    options: Any = {"opening": "<|end_header_id|>\n\n", "template": ChatTemplate(LLAMA)}
    with scripted_server(lambda _: call, **options) as server:
        answer = ask(server, api, "Call it.", stream=stream, tools=tools, max_tokens=200, extra=wanted)
    assert (answer.text, answer.arguments, answer.reason) == ("", [{"tags": ["a", "a"]}], "calls")
    if api is RESPONSES:
        assert [item["type"] for item in answer.turns] == ["function_call"]


ODD_ARGUMENTS = [
    '{"n": 1e999}',
    '{"n": [-1e999, 1.50]}',
    '{\n  "n": [\n    1\n  ]\n}',
    '{"n": 1000000000000000000001}',
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES, OLLAMA], ids=lambda api: api.name)
def test_f37_arguments_have_the_values_that_the_model_wrote(api: Api, stream: bool) -> None:
    written = [*ODD_ARGUMENTS]
    tools = [{"name": "find", "parameters": {"type": "object", "properties": {"n": {}}}}]
    options: Any = {"opening": "<|end_header_id|>\n\n", "template": ChatTemplate(LLAMA)}
    with scripted_server(lambda _: f'{{"name": "find", "parameters": {written[0]}}}', **options) as server:
        while written:
            answer = ask(server, api, "Call it.", stream=stream, tools=tools, max_tokens=900)
            assert (answer.arguments, answer.reason) == ([json.loads(written.pop(0))], "calls")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.sampled_from([None, 1]), st.booleans())
def test_f37_whole_arguments_are_unchanged_and_on_one_line(
    value: dict[str, Any], indent: int | None, is_ascii: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii).replace("Infinity", "1e999")
    text = text.replace("NaN", "-0.0")
    written = bytes(arguments_json(text))
    assert b"\n" not in written
    assert json.loads(written) == json.loads(text)
    assert msgspec.json.decode(written, type=dict[str, msgspec.Raw]).keys() == value.keys()
    for cut in range(len(text)):  # a truncated call: the part that a client reads from the stream
        try:
            so_far = jiter.from_json(text[:cut].encode(), partial_mode=True)
        except ValueError:  # nothing yet, or half of a pair of surrogates
            so_far = {}
        assert json.loads(bytes(arguments_json(text[:cut]))) == so_far


@pytest.mark.parametrize("value", ["[" * 500 + "]" * 500, "1" + "0" * 400], ids=["deep", "large"])
def test_f37_deep_and_large_arguments_are_not_lost(value: str) -> None:
    text = '{"n":' + value + "}"
    assert bytes(arguments_json(text)) == text.encode()


@given(PARTS, st.booleans())
def test_f37_a_response_that_is_polled_is_encoded_once_for_each_change(
    parts: list[Part], has_tokens: bool
) -> None:
    writer = response_writer(has_logprobs=has_tokens)
    writer.queue()
    for delta in deltas_of(parts, has_tokens=has_tokens):
        before = writer.body
        writer.write([delta])
        assert writer.body == msgspec.json.encode(writer.answer)
        assert (writer.body is before) == (writer.body == before)
