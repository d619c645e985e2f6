"""Items of responses that are kept: read once, measured, and harmless for any input."""

from __future__ import annotations

import gc
import json
import pickle
import random
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import httpx2
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.api_server import MODEL, ApiServer, api_server

from agentflow.errors import RateLimited
from agentflow.protocol.bounds.sized import sized
from agentflow.protocol.chat import CalledTool, Message
from agentflow.runtime.limits import MemoryBudget
from agentflow.server.errors import ApiError
from agentflow.server.openai.responses.items import ItemReader, Turns
from agentflow.server.responses.background import BackgroundRun, BackgroundRuns, open_background_runs
from agentflow.server.responses.item import Item, Reasoning
from agentflow.server.responses.store import History, ResponseStore, StoredResponse

HELLO = {"role": "user", "content": "Hello."}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
FIELDS = ("id", "type", "role", "content", "call_id", "name", "arguments", "output", "summary", "status", "x")
ITEMS = st.builds(
    lambda whole, odd: {**whole, **odd},
    st.sampled_from(
        [
            HELLO,
            {"type": "message", "id": "msg_1", "role": "assistant", "content": "Hi."},
            {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "item_reference", "id": "msg_1"},
        ]
    ),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2),
)


def post(server: ApiServer, path: str, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/{path}", json=fields, timeout=30)


def test_f26a_odd_items_harm_nobody() -> None:
    with api_server(constraints=False) as server:

        @example([{**HELLO, "id": {"a": 1}}], True)
        @example([{**HELLO, "id": {"a": 1}}], False)
        @given(st.lists(ITEMS, min_size=1, max_size=3), st.booleans())
        def send(items: list[Any], background: bool) -> None:
            fields = {"model": MODEL, "input": items, "max_output_tokens": 1}
            answer = post(server, "responses", **fields, background=background)
            assert answer.status_code < 500
            made = post(server, "conversations", items=items)
            assert made.status_code < 500
            assert (made.status_code == 200) == (answer.status_code == 200)
            assert post(server, "responses", **{**fields, "input": [HELLO]}).status_code == 200

        send()
        server.wait_until(lambda: not server.service.background._runs)


@pytest.mark.anyio
async def test_f26b_a_response_that_cannot_be_stored_ends_alone() -> None:
    async def generate(accept: Any) -> None:
        accept()

    def finish(failure: ApiError | None, is_cancelled: bool) -> None:
        raise TypeError("unhashable type: 'dict'")

    async with open_background_runs(2) as runs:
        for number in range(3):
            run = BackgroundRun(f"resp_{number}", "ann", MemoryBudget(10_000), lambda: b"{}", (), None)
            await runs.start(run, generate, finish)
            with anyio.fail_after(5):
                await run.cancel()
        assert runs.find("ann", "resp_2") is None


@pytest.mark.anyio
async def test_the_limit_of_background_responses_holds_for_those_that_start_together() -> None:
    accepted: list[int] = []
    memories = [MemoryBudget(10_000) for _ in range(5)]

    async def start(runs: BackgroundRuns, number: int) -> None:
        async def generate(accept: Callable[[], None]) -> None:
            accept()
            await anyio.sleep_forever()

        async def finish(failure: ApiError | None, is_cancelled: bool) -> None:
            pass

        run = BackgroundRun(f"resp_{number}", "ann", memories[number], lambda: b"{}", (), None)
        with suppress(RateLimited):
            await runs.start(run, generate, finish)
            accepted.append(number)

    async with open_background_runs(2) as runs:
        async with anyio.create_task_group() as group:
            for number in range(5):
                memories[number].reserve(100)
                group.start_soon(start, runs, number)
        assert len(accepted) == 2
        assert [memory.num_bytes for memory in memories].count(100) == 2
        await runs._runs["ann", f"resp_{accepted[0]}"].cancel()
        await start(runs, min({0, 1, 2, 3, 4} - {*accepted}))
        assert len(accepted) == 3


def read(*items: dict[str, Any]) -> list[Item]:
    reader = ItemReader("model", lambda _: None)
    return [reader.read(msgspec.Raw(json.dumps(item).encode()), "input") for item in items]


def test_f28a_unknown_fields_are_not_kept() -> None:
    [item] = read({**HELLO, "id": "msg_1", "junk": ["x"] * 100_000, "content": [
        {"type": "input_text", "text": "Hello.", "junk": "x" * 100_000},
    ]})  # fmt: skip
    content = [{"type": "input_text", "text": "Hello."}]
    known = {"id": "msg_1", "type": "message", "role": "user", "content": content, "status": "completed"}
    assert json.loads(item.shown) == known
    assert item.num_bytes < 2_000


@given(st.lists(ITEMS, min_size=1, max_size=6))
def test_f26c_an_item_that_is_shown_is_read_again_alike(items: list[dict[str, Any]]) -> None:
    """Clients send items back in the form of the listing."""
    try:
        first = read(*items)
    except ApiError:
        return
    again = read(*(json.loads(item.shown) for item in first))
    assert [(item.id, item.step, item.shown) for item in again] == [
        (item.id, item.step, item.shown) for item in first
    ]


def test_f28b_histories_count_until_the_last_response_is_gone() -> None:
    store = ResponseStore(1_000_000, 60)
    history: History | None = None
    for number in range(3):
        history = History(history, [Message("user", "x" * 50_000)])
        assert store.add("ann", StoredResponse(f"resp_{number}", b"{}", history, (), ()))
    assert [len(message.content) for message in history.messages()] == [50_000] * 3
    del history
    for number in range(2):
        assert store.delete("ann", f"resp_{number}")
    assert store.num_bytes > 150_000  # the third response continues the other two
    assert store.delete("ann", "resp_2")
    assert store.num_bytes == 0


def test_f28b_a_store_drops_the_oldest_until_histories_fit() -> None:
    store = ResponseStore(400_000, 60)
    for number in range(20):
        history = History(None, [Message("user", "x" * 50_000)])
        assert store.add("ann", StoredResponse(f"resp_{number}", b"{}", history, (), ()))
        del history
        assert store.num_bytes <= 400_000
    assert store.find("ann", "resp_19") is not None
    assert store.find("ann", "resp_12") is None
    assert not store.add(
        "bob", StoredResponse("r", b"", History(None, [Message("user", "x" * 400_000)]), (), ())
    )


BEFORE = st.sampled_from(
    [
        Message("user", "Why?"),
        Message("assistant", "Said.", reasoning="Before."),
        Message("assistant", "", tool_calls=(CalledTool("c", "f", "{}"),)),
    ]
)
STEPS = st.lists(
    st.sampled_from(
        [
            Message("user", "Why?"),
            Message("assistant", "So."),
            Message("assistant", "Said.", reasoning="Before."),
            CalledTool("c", "f", "{}"),
            CalledTool("d", "g", "{}"),
            Message("tool", "1", tool_call_id="c"),
            Reasoning("Hm."),
            Reasoning("Ah."),
            Reasoning(""),
        ]
    ),
    min_size=6,
    max_size=20,
)


@given(st.lists(BEFORE, max_size=3), STEPS)
def test_f26c_turns_are_those_of_a_reader_that_copies(before: list[Message], steps: list[Any]) -> None:
    """Against adding each item immediately to the message before it."""
    turns, messages = Turns(before), [*before]
    called = {call.id: call.name for message in before for call in message.tool_calls}
    reasoning = None
    for number, step in enumerate(steps):
        item = Item("i", b"{}", step, 0)
        match step:
            case Reasoning(text):
                turns.add(item, "")
                reasoning = text or None
                continue
            case CalledTool():
                called[step.id] = step.name
                if not messages or messages[-1].role != "assistant":
                    messages.append(Message("assistant", ""))
                last = messages[-1]
                messages[-1] = msgspec.structs.replace(last, tool_calls=(*last.tool_calls, step))
            case Message(role="tool"):
                if step.tool_call_id not in called:
                    with pytest.raises(ApiError):
                        turns.add(item, "")
                    continue
                messages.append(msgspec.structs.replace(step, name=called[step.tool_call_id]))
                turns.add(item, "")
                continue
            case Message():
                messages.append(step)
        turns.add(item, "")
        last = messages[-1]
        if last.role == "assistant" and reasoning is not None:
            reasoning = f"{last.reasoning}\n{reasoning}" if last.reasoning else reasoning
            messages[-1] = msgspec.structs.replace(last, reasoning=reasoning)
            reasoning = None
        if isinstance(step, Message):
            reasoning = None
        if number % 3 == 0:
            assert turns.messages == messages
    assert turns.messages == messages


def kept_of(seed: int) -> Any:
    """Something of every type that a server keeps, of a few kilobytes."""
    rng = random.Random(seed)

    def text() -> str:
        return rng.choice(["x", "é", "語", "😀"]) * rng.randrange(200)

    made: list[Any] = [text() for _ in range(20)]
    made += [{text(): number, text(): [text()] * 3} for number in range(10)]
    made += [Message("user", text(), tool_calls=(CalledTool(text(), "f", text()),)) for _ in range(10)]
    made += [text().encode() for _ in range(10)]
    return made


@pytest.mark.parametrize("seed", range(5))
def test_f28c_sizes_are_those_of_the_allocator(seed: int) -> None:
    data = pickle.dumps(kept_of(seed))
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = pickle.loads(data)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.8 < sized(kept) / (after - before) < 1.4


def test_f28c_shared_objects_and_deep_ones() -> None:
    text = "x" * 10_000
    assert sized([text] * 100, text) < 2 * 10_000
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert sized(deep) > 100_000 * 64
