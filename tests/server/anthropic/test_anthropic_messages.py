"""``messages.create`` and ``count_tokens`` of Anthropic's own client."""

from __future__ import annotations

import anthropic
import anyio
import anyio.to_thread
import pydantic
import pytest
from support.server.anthropic_peer import HELLO, anthropic_peer, asking
from support.server.module_servers import module_fixture

MARKS = "<|im_start|>{}\n{}<|im_end|>\n"


peer = module_fixture(anthropic_peer)


def test_an_answer_is_a_message(peer):
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "something-2020-01-01"}
    asked = asking(messages=HELLO, system="A.", extra_headers=headers)
    reply = peer.client.messages.with_raw_response.create(**asked)
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
    # Cached tokens are not counted among the input tokens.
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
    mark = peer.server.generator.tokenizer.find_id("<|im_end|>")
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


def test_an_answer_is_parsed_to_a_model(peer):
    parsed = peer.client.messages.parse(**asking(output_format=Sky, max_tokens=300))
    assert isinstance(parsed.parsed_output, Sky)


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
