"""The Responses API with OpenAI's own client: turns, streams, stored turns, tools, forms."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from support.api_server import MODEL, ApiServer
from support.server.module_servers import module_fixture
from support.server.openai_peer import any_text_server, logit_server, sync_client
from support.server.scripted_model import scripted_server

QUESTION = "What do plants do?"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
server = pytest.fixture(logit_server, scope="module")


constrained = pytest.fixture(any_text_server, scope="module")


class Report(pydantic.BaseModel):
    is_sunny: bool


def scripted(before: str) -> str:
    """Calls the tool and repeats its result."""
    return "It is sunny." if "sunny" in before else f"Let me look.\n{CALL}"


calling = module_fixture(scripted_server, scripted)
"""A server whose model follows the script."""


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": QUESTION, "max_output_tokens": 12, "temperature": 0, **fields}


def test_the_prompt_is_that_of_a_chat(server: ApiServer) -> None:
    sent = server.observe_requests()
    items: Any = [
        {"role": "developer", "content": "Be kind."},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What do "},
                {"type": "input_text", "text": "plants do?"},
            ],
        },
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "They grow.", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": "And animals?"},
    ]
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "They grow."},
        {"role": "user", "content": "And animals?"},
    ]
    with sync_client(server) as client:
        client.responses.create(**asked(input=items, instructions="Be brief."))
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert sent.submits[-2].token_ids == sent.submits[-1].token_ids


@pytest.mark.parametrize("max_output_tokens", [4, 200])
def test_the_events_of_a_stream_make_the_response(server: ApiServer, max_output_tokens: int) -> None:
    fields = asked(
        max_output_tokens=max_output_tokens,
        extra_body={"seed": 4},
        temperature=1,
        include=["message.output_text.logprobs"],
    )
    with sync_client(server) as client:
        whole = client.responses.create(**fields)
        events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if not event.type.endswith(".delta")]
    is_cut = whole.status == "incomplete"
    assert is_cut == (max_output_tokens == 4)
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete" if is_cut else "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
        whole.output_text
    )
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert last.response.usage.output_tokens == whole.usage.output_tokens  # type: ignore[union-attr]
    assert (whole.incomplete_details is not None) == is_cut
    [message] = last.response.output
    assert message.status == whole.status
    tokens = message.content[0].logprobs
    assert tokens
    assert whole.output_text.startswith("".join(token.token for token in tokens[:3]))


def test_a_turn_continues_a_stored_one(server: ApiServer) -> None:
    sent = server.observe_requests()
    with sync_client(server) as client:
        first = client.responses.create(**asked(instructions="Be brief."))
        second = client.responses.create(
            **asked(input="And animals?", previous_response_id=first.id, instructions="Be brief.")
        )
        earlier, later = sent.submits[-2:]
        # Token by token: the second turn finds the whole first one.
        assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
        assert second.usage is not None
        assert first.usage is not None
        known = first.usage.input_tokens + first.usage.output_tokens - 1
        assert second.usage.input_tokens_details.cached_tokens >= known - 1
        assert client.responses.retrieve(second.id).output_text == second.output_text
        assert second.previous_response_id == first.id
        [item] = client.responses.input_items.list(second.id)
        assert item.content[0].text == "And animals?"  # type: ignore[union-attr]
        client.responses.delete(first.id)
        for use in (
            lambda: client.responses.retrieve(first.id),
            lambda: client.responses.create(**asked(previous_response_id=first.id)),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                use()
            assert caught.value.code == "response_not_found"
        # Its continuation is complete by itself.
        client.responses.create(**asked(input="Why?", previous_response_id=second.id))
        unstored = client.responses.create(**asked(store=False))
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(unstored.id)


@pytest.mark.parametrize("streams", [False, True])
def test_a_loop_with_references_to_items(calling: ApiServer, streams: bool) -> None:
    with sync_client(calling) as client:

        def respond(**fields: Any) -> Any:
            fields = {"model": MODEL, "tools": [WEATHER], **fields}
            if not streams:
                return client.responses.create(**fields)
            with client.responses.stream(**fields) as stream:
                return stream.get_final_response()

        first = respond(input="How is the weather in Oslo?")
        assert [item.type for item in first.output] == ["message", "function_call"]
        call = first.output[1]
        assert first.output_text.strip() == "Let me look."
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        question = {"role": "user", "content": "How is the weather in Oslo?"}
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        second = respond(input=[question, *references, result])
        assert second.output_text == "It is sunny."
        assert second.status == "completed"
        # The generated tokens of the call are cached: all but the last one, which was not computed before.
        known = first.usage.input_tokens + first.usage.output_tokens - 1
        assert second.usage.input_tokens_details.cached_tokens >= known - 1


def test_an_answer_is_parsed_to_a_model(constrained: ApiServer) -> None:
    with sync_client(constrained) as client:
        parsed = client.responses.parse(**asked(text_format=Report, max_output_tokens=60))
        assert isinstance(parsed.output_parsed, Report)


def test_old_turns_are_left_out_where_that_is_requested(server: ApiServer) -> None:
    items: Any = [{"role": "user", "content": f"{number}: {'plants ' * 20}"} for number in range(40)]
    with sync_client(server) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**asked(input=items))
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
        sent = server.observe_requests()
        client.responses.create(**asked(input=items, truncation="auto", instructions="Be brief."))
    assert "Be brief." in sent.prompt
    assert "39: plants" in sent.prompt
    assert "0: plants plants" not in sent.prompt.replace("10:", "").replace("20:", "").replace("30:", "")


def test_f37_the_shape_of_a_coding_agents_request(constrained: ApiServer) -> None:
    """The fields of Codex's requests, with an earlier turn as history."""
    history: Any = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    ]
    with (
        sync_client(constrained) as client,
        client.responses.create(
            model=MODEL,
            instructions="You are a coding agent.",
            input=history,
            tools=[WEATHER],
            tool_choice="auto",
            parallel_tool_calls=False,
            reasoning={"effort": "medium", "summary": "auto"},
            store=False,
            stream=True,
            include=["reasoning.encrypted_content"],
            prompt_cache_key="thread",
            max_output_tokens=4,
            extra_body={"client_metadata": {"x-codex-installation-id": "1"}},
        ) as stream,
    ):
        assert [event.type for event in stream][-1] in ("response.completed", "response.incomplete")


def test_f37_the_tokens_of_a_prompt_are_counted(server: ApiServer, constrained: ApiServer) -> None:
    with sync_client(server) as client:
        first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=4)
        asked: Any = {"input": "Why?", "instructions": "Be brief.", "previous_response_id": first.id}
        counted = client.responses.input_tokens.count(model=MODEL, **asked)
        assert type(counted).model_validate(counted.to_dict()) == counted
        second = client.responses.create(model=MODEL, max_output_tokens=4, **asked)
        assert second.usage is not None
        assert counted.input_tokens == second.usage.input_tokens
    with sync_client(constrained) as client:
        with_tools = client.responses.input_tokens.count(model=MODEL, input=QUESTION, tools=[WEATHER])
        assert (
            with_tools.input_tokens
            > client.responses.input_tokens.count(model=MODEL, input=QUESTION).input_tokens
        )
