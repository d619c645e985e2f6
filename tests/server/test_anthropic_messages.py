"""``messages.create`` and ``count_tokens`` of Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import anthropic
import anyio
import anyio.to_thread
import pydantic
import pytest
from server.anthropic_peer import HELLO, AnthropicPeer, anthropic_peer, asking

MARKS = "<|im_start|>{}\n{}<|im_end|>\n"


@pytest.fixture(scope="module")
def peer() -> Iterator[AnthropicPeer]:
    with anthropic_peer() as running:
        yield running
        running.server.assert_idle()


def test_an_answer_is_a_message(peer):
    reply = peer.client.messages.with_raw_response.create(**asking(messages=HELLO, system="A."))
    message = reply.parse()
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert message.id.startswith("msg_")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    [block] = message.content
    assert block.type == "text"
    assert block.text
    assert message.usage.output_tokens == 12
    assert message.usage.cache_creation_input_tokens == 0
    assert reply.headers["request-id"].startswith("req_")
    assert message._request_id == reply.headers["request-id"]
    again = peer.ask(system="A.")
    assert again.content[0].text == block.text
    # What was cached is not counted among the input tokens.
    total = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert again.usage.cache_read_input_tokens == total - 1
    assert again.usage.input_tokens == 1


def test_the_prompt_is_the_conversation_under_the_template(peer):
    text = {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    peer.ask(
        system=[text, {"type": "text", "text": " brief."}],
        messages=[
            {"role": "user", "content": "One"},
            {"role": "user", "content": [{"type": "text", "text": "Tw"}, {"type": "text", "text": "o"}]},
            {"role": "assistant", "content": "Th"},
            {"role": "assistant", "content": [{"type": "text", "text": "ree"}]},
            {"role": "system", "content": "Now."},
            {"role": "user", "content": "<|im_end|>"},
        ],
    )
    turns = [("system", "Be brief."), ("user", "One\n\nTwo"), ("assistant", "Three"), ("system", "Now.")]
    expected = "".join([MARKS.format(*turn) for turn in [*turns, ("user", "<|im_end|>")]])
    assert peer.requests.prompt == expected + "<|im_start|>assistant\n"
    # The mark that the user wrote is text.
    ids = peer.requests.submits[-1].token_ids
    mark = peer.server.generator.tokenizer.id_of("<|im_end|>")
    assert list(ids).count(mark) == 5


def test_a_last_message_of_the_assistant_goes_on(peer):
    peer.ask(messages=[*HELLO, {"role": "assistant", "content": "They turn"}])
    assert peer.requests.prompt.endswith("<|im_start|>assistant\nThey turn")


def test_a_whole_reply_can_be_sent_back(peer):
    reply = peer.ask()
    again = peer.ask(messages=[*HELLO, reply.to_param(), {"role": "user", "content": "And?"}])
    assert MARKS.format("assistant", reply.content[0].text) in peer.requests.prompt
    # It is the tokens that were generated, not other ones for the same text.
    before = reply.usage.input_tokens + reply.usage.cache_read_input_tokens + reply.usage.output_tokens
    assert again.usage.cache_read_input_tokens >= before - 1


def test_sampling_is_as_it_is_asked_for(peer):
    peer.ask(
        stop_sequences=["never this", "nor that"],
        extra_body={
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "seed": 11,
            "cache_salt": "mine",
            "priority": 2,
        },
    )
    submit = peer.requests.submits[-1]
    params = submit.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 12)
    assert params.stop == ("never this", "nor that")
    origin = submit.origin
    assert (submit.seed, origin.cache_salt, origin.priority) == (11, "mine", 2)
    peer.ask(extra_body={"temperature": None, "top_p": None, "top_k": None, "seed": None, "stream": None})
    params = peer.requests.submits[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)


def test_what_has_no_effect_is_taken(peer):
    plain = peer.ask()
    for params in (
        {"metadata": {"user_id": "somebody"}},
        {"service_tier": "auto"},
        {"service_tier": "standard_only"},
        {"thinking": {"type": "disabled"}},
        {"cache_control": {"type": "ephemeral"}},
        {"speed": "standard"},
        {"tool_choice": {"type": "auto"}},
        {"container": None, "diagnostics": None, "inference_geo": None},
        {"extra_headers": {"anthropic-version": "2023-06-01", "anthropic-beta": "something-2020-01-01"}},
    ):
        assert peer.ask(**params).content == plain.content, params


def test_a_stop_sequence_is_told(peer):
    free = peer.ask(max_tokens=24).content[0].text
    stop = free[6:9]
    message = peer.ask(max_tokens=24, stop_sequences=["never", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == free[: free.index(stop)]


def test_an_answer_without_text_has_no_blocks(peer):
    free = peer.ask().content[0].text
    message = peer.ask(stop_sequences=[free[0]])
    assert (message.content, message.stop_reason) == ([], "stop_sequence")


def test_an_answer_that_fills_the_context_says_so(peer):
    message = peer.ask(max_tokens=5000)
    usage = message.usage
    assert message.stop_reason == "model_context_window_exceeded"
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens == 1024


class Sky(pydantic.BaseModel):
    color: bool
    clouds: bool


def test_an_answer_has_the_schema_that_is_asked_for(peer):
    parsed = peer.client.messages.parse(**asking(output_format=Sky, max_tokens=300))
    assert isinstance(parsed.parsed_output, Sky)
    schema = {
        "type": "object",
        "properties": {"wet": {"type": "boolean"}},
        "required": ["wet"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "schema": schema}
    for params in ({"output_config": {"format": asked}}, {"extra_body": {"output_format": asked}}):
        text = peer.ask(max_tokens=300, **params).content[0].text
        assert isinstance(json.loads(text)["wet"], bool)


def test_tokens_are_counted_and_nothing_is_run(peer):
    turns = {"system": "Be brief.", "messages": HELLO}
    message = peer.ask(**turns)
    num_asked = len(peer.requests.submits)
    counted = peer.client.messages.count_tokens(
        model="fake", **turns, thinking={"type": "disabled"}, tool_choice={"type": "none"}
    )
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert len(peer.requests.submits) == num_asked
    longer = [*HELLO, {"role": "assistant", "content": "x" * 5000}]
    assert peer.client.messages.count_tokens(model="fake", messages=longer).input_tokens > 1024


@pytest.mark.anyio
async def test_the_asynchronous_client_gets_the_same(peer, anyio_backend):
    whole = await anyio.to_thread.run_sync(peer.ask)
    async with anthropic.AsyncAnthropic(api_key="any", base_url=peer.server.url, max_retries=0) as client:
        message = await client.messages.create(**asking())
        assert message.content == whole.content
        counted = await client.messages.count_tokens(model="fake", messages=HELLO)
        usage = whole.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        async with client.messages.stream(**asking()) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
    assert "".join(texts) == whole.content[0].text
    assert final.content[0].text == whole.content[0].text


@pytest.mark.anyio
async def test_who_gives_up_is_not_answered(peer, anyio_backend):
    gate = peer.server.engine.gate
    gate.allow(3)
    async with anthropic.AsyncAnthropic(api_key="any", base_url=peer.server.url, max_retries=0) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(client.messages.create, **asking(max_tokens=900)))
            await anyio.to_thread.run_sync(peer.server.call, gate.held)
            group.cancel_scope.cancel()
        # The engine stands still: nobody waits for it, though nothing has ended.
        await anyio.to_thread.run_sync(peer.until_not_asked)
    gate.open()
    await anyio.to_thread.run_sync(peer.server.assert_idle)
