"""Conversation objects with OpenAI's own client: their items, turns on them, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import FakeEngine
from support.faulty_servers import KEY, tenants
from support.server.openai_peer import logit_server, sync_client

from agentflow.server.config.limits import HttpLimits
from agentflow.server.openai.responses.items import ItemReader
from agentflow.server.responses.item import Item
from agentflow.server.tenants.rate_limit import TenantGate

server = pytest.fixture(logit_server, scope="module")


@pytest.fixture
def client(server: ApiServer) -> Iterator[openai.OpenAI]:
    with sync_client(server) as made:
        yield made


def said(text: str, role: str = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


def call_and_result() -> list[Any]:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    return [call, {"type": "function_call_output", "call_id": "c", "output": "a leaf"}]


def asked(**fields: Any) -> Any:
    return {"model": MODEL, "input": "What do plants do?", "max_output_tokens": 6, "temperature": 0, **fields}


def test_a_conversation_and_its_items(client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[said("one"), said("two")], metadata={"topic": "plants"})
    assert made.metadata == {"topic": "plants"}
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"topic": "trees"}).metadata == {"topic": "trees"}
    added = client.conversations.items.create(made.id, items=[said("three"), said("four", "assistant")])
    assert texts(added.data) == ["three", "four"]
    assert texts(client.conversations.items.list(made.id, order="asc", limit=3)) == [
        "one",
        "two",
        "three",
        "four",
    ]
    assert texts(client.conversations.items.list(made.id)) == ["four", "three", "two", "one"]
    [first, *_] = client.conversations.items.list(made.id, order="asc")
    assert first.id is not None
    assert client.conversations.items.retrieve(first.id, conversation_id=made.id) == first
    client.conversations.items.delete(first.id, conversation_id=made.id)
    assert texts(client.conversations.items.list(made.id, order="asc")) == ["two", "three", "four"]
    with pytest.raises(openai.NotFoundError) as caught:
        client.conversations.items.retrieve(first.id, conversation_id=made.id)
    assert caught.value.code == "item_not_found"
    assert client.conversations.delete(made.id).deleted
    for use in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError) as caught:
            use(made.id)
        assert caught.value.code == "conversation_not_found"


@pytest.mark.parametrize("way", ["whole", "stream", "background", "not stored"])
def test_turns_are_appended_and_continue_it(server: ApiServer, client: openai.OpenAI, way: str) -> None:
    sent = server.observe_requests()
    made = client.conversations.create(items=[said("Hello.")])
    fields: dict[str, Any] = {"conversation": made.id, "instructions": f"Be brief ({way})."}
    answers = []
    for question in ("What do plants do?", "And animals?", "Why?"):
        match way:
            case "stream":
                with client.responses.stream(**asked(input=question, **fields)) as stream:
                    *_, last = stream
                response: Any = getattr(last, "response")  # noqa: B009
            case "background":
                started = client.responses.create(**asked(input=question, background=True, **fields))
                server.wait_until(lambda: not server.service.background._runs)
                response = client.responses.retrieve(started.id)
            case _:
                fields["conversation"] = {"id": made.id}
                response = client.responses.create(**asked(input=question, store=way == "whole", **fields))
        assert response.conversation.id == made.id
        answers.append(response)
    questions = ["What do plants do?", "And animals?", "Why?"]
    pairs = [text for pair in zip(questions, answers, strict=True) for text in (pair[0], pair[1].output_text)]
    assert texts(client.conversations.items.list(made.id, order="asc")) == ["Hello.", *pairs]
    # Token by token: each turn begins with the whole earlier prompt, and computes only the new tokens.
    earlier, later = sent.submits[-2:]
    assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
    before = answers[-2].usage
    assert answers[-1].usage.input_tokens_details.cached_tokens >= (
        before.input_tokens + before.output_tokens - 2
    )


def test_a_turn_that_is_cancelled_or_refused_leaves_it_as_it_was() -> None:
    with api_server(FakeEngine(), constraints=False) as server, sync_client(server) as client:
        made = client.conversations.create(items=[said("Hello.")])
        server.call(server.engine.gate.allow, 0)
        running = client.responses.create(**asked(conversation=made.id, background=True))
        client.responses.cancel(running.id)
        server.call(server.engine.gate.open)
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**asked(conversation=made.id, input="x " * 3_000))
        assert texts(client.conversations.items.list(made.id)) == ["Hello."]
        # One that was deleted in the meantime stays deleted.
        server.call(server.engine.gate.allow, 0)
        running = client.responses.create(**asked(conversation=made.id, background=True))
        client.conversations.delete(made.id)
        server.call(server.engine.gate.open)
        server.wait_until(lambda: not server.service.background._runs)
        assert client.responses.retrieve(running.id).status in ("completed", "incomplete")
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(made.id)


def test_an_item_that_a_later_one_needs_is_not_deleted(client: openai.OpenAI) -> None:
    call: Any = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    made = client.conversations.create(items=[said("How is it?"), call, result])
    items: Any = list(client.conversations.items.list(made.id, order="asc"))
    with pytest.raises(openai.BadRequestError) as caught:
        client.conversations.items.delete(items[1].id, conversation_id=made.id)
    assert caught.value.param == "item_id"
    for item in reversed(items):
        client.conversations.items.delete(item.id, conversation_id=made.id)
    assert list(client.conversations.items.list(made.id)) == []


def test_f37_deleting_an_item_reads_no_other(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    made = client.conversations.create(items=[said(str(number)) for number in range(20)])
    items = list(client.conversations.items.list(made.id, order="asc"))
    with monkeypatch.context() as patch:
        patch.delattr(ItemReader, "read")
        patch.delattr(Item, "made")
        client.conversations.items.delete(str(items[3].id), conversation_id=made.id)
    left = [number for number in range(20) if number != 3]
    assert texts(client.conversations.items.list(made.id, order="asc")) == [str(number) for number in left]


def test_items_are_found_by_reference(client: openai.OpenAI) -> None:
    response = client.responses.create(**asked())
    reference: Any = {"type": "item_reference", "id": response.output[0].id}
    made = client.conversations.create(items=[reference])
    client.responses.delete(response.id)
    assert texts(client.conversations.items.list(made.id)) == [response.output_text]
    client.responses.create(**asked(input=[said("Why?"), reference]))


def test_refused_turns_and_items_have_the_field(client: openai.OpenAI) -> None:
    made = client.conversations.create()
    response = client.responses.create(**asked())
    for use, param in (
        (lambda: client.conversations.create(items=[said("x")] * 21), "items"),
        (lambda: client.conversations.create(items=[{"type": "web_search_call"}]), "items[0].type"),  # type: ignore[list-item]
        (lambda: client.conversations.create(metadata={"a": "x" * 513}), "metadata[...]"),
        (lambda: client.conversations.items.list(made.id, after="msg_none"), "after"),
        (
            lambda: client.responses.create(**asked(conversation=made.id, previous_response_id=response.id)),
            "conversation",
        ),
        (lambda: client.responses.create(**asked(conversation=3)), "conversation"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            use()
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.create(**asked(conversation="conv_none"))
    assert (gone.value.param, gone.value.code) == ("conversation", "conversation_not_found")


def test_a_conversation_that_memory_cannot_hold_is_refused() -> None:
    limits = HttpLimits(responses_bytes=40_000)
    with (
        api_server(limits=limits, constraints=False) as server,
        sync_client(server) as client,
        pytest.raises(openai.BadRequestError),
    ):
        client.conversations.create(items=[said("x" * 20_000)])


def test_tenants_see_their_own_and_changes_count_as_requests() -> None:
    known = tenants("requests_per_minute = 3")
    with api_server(tenants=known, gate=TenantGate(lambda: 0), constraints=False) as server:
        with sync_client(server, api_key=KEY) as client:
            made = client.conversations.create()
            client.conversations.items.create(made.id, items=[said("x")])
            client.conversations.update(made.id, metadata={})
            with pytest.raises(openai.RateLimitError):
                client.conversations.create()
            assert client.conversations.retrieve(made.id).metadata == {}
        assert server.call(server.service.responses.find_conversation, "ann", made.id) is not None
        assert server.call(server.service.responses.find_conversation, "bob", made.id) is None


def test_f37_given_items_have_the_fields_that_the_client_requires(client: openai.OpenAI) -> None:
    parts = [{"type": "output_text", "text": "grow"}, {"type": "refusal", "refusal": "no"}]
    items = [said("one"), said("two", "system"), *call_and_result(), said("three", "assistant")]
    items.append({"type": "message", "role": "assistant", "content": parts})
    made = client.conversations.create(items=items)
    answer = client.responses.create(**asked(conversation=made.id, input=[*items, said("four")]))
    listed = [*client.conversations.items.list(made.id), *client.responses.input_items.list(answer.id)]
    for item in listed:
        type(item).model_validate(item.to_dict())
        assert item.status == "completed"
