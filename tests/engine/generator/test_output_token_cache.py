"""The output token cache against a plain list, and the keys of conversations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.engine.generator.context import TOKENS_PER_ENTRY, OutputTokenCache, conversation_keys
from agentflow.protocol.chat import CalledTool, Message

CALL = CalledTool("call_1", "weather", '{"city": "Oslo"}')


def test_a_key_covers_every_field():
    conversations = [
        [Message("user", "a")],
        [Message("user", "b")],
        [Message("system", "a")],
        [Message("user", "a"), Message("user", "")],
        [Message("user", ""), Message("user", "a")],
        [Message("user", "a", name="ann")],
        [Message("assistant", "a")],
        [Message("assistant", "a", tool_calls=(CALL,))],
        [Message("assistant", "a", tool_calls=(CALL, CALL))],
        [Message("tool", "a", tool_call_id="call_1")],
        [Message("tool", "a", tool_call_id="call_2")],
        [Message("tool", "a", tool_call_id="")],
        [Message("tool", "a")],
        [Message("user", "\ud800")],
    ]
    keys = [conversation_keys(messages)[-1] for messages in conversations]
    assert len(set(keys)) == len(conversations)
    assert conversation_keys(conversations[0], start=b"tools")[-1] not in keys
    assert conversation_keys([*conversations[0], *conversations[1]])[0] == keys[0]
    assert conversation_keys([]) == []


def test_whether_a_turn_was_generated_does_not_matter():
    asked, answered = Message("user", "a"), Message("assistant", "b")
    generated = Message("assistant", "b", generated=True)
    assert conversation_keys([asked, answered]) == conversation_keys([asked, generated])


@pytest.mark.parametrize(
    ("arguments", "equal", "other"),
    [
        ('{"a": 1.0,"b": [0.50]}', '{"b":[0.5],"a":1}', '{"a": 1, "b": [0.51]}'),
        ('{"a": "\\u00e9"}', '{"a":"é"}', '{"a": "e"}'),
        ('{"a": true}', '{ "a":true }', '{"a": 1}'),
        ('{"a": "1"}', '{"a" : "1"}', '{"a": 1}'),
        ('{"a": 9007199254740993}', '{"a":9007199254740993}', '{"a": 9007199254740992}'),
        ('{"a": 1e999}', '{"a": 1e999}', '{"a": 2e999}'),
        ('{"a": "trunc', '{"a": "trunc', '{"a":"trunc'),
        ("[" * 100_000, "[" * 100_000, "[" * 99_999),
    ],
)
def test_arguments_are_compared_as_json(arguments: str, equal: str, other: str):
    def key(text: str, call_id: str = "c") -> bytes:
        called = Message("assistant", "", tool_calls=(CalledTool(call_id, "weather", text),))
        return conversation_keys([called])[0]

    assert key(arguments) == key(equal, "another id")
    assert key(arguments) != key(other)


EVENT = st.tuples(
    st.booleans(),
    st.sampled_from([b"a", b"b", b"c", b"d"]),
    st.integers(0, 6),
    st.sampled_from(["", "<call>", "\N{SNOWMAN}" * 40]),
)


def size_of(token_ids: list[int], calling: str) -> int:
    return TOKENS_PER_ENTRY + len(token_ids) + len(calling.encode()) // 4


@given(st.integers(0, 4 * TOKENS_PER_ENTRY), st.lists(EVENT, max_size=40))
def test_the_least_recently_used_entry_goes_first(room, events):
    cache = OutputTokenCache(room)
    kept: list[tuple[bytes, tuple[list[int], str]]] = []  # the oldest first
    for number, (is_put, key, length, calling) in enumerate(events):
        if is_put:
            answer = ([number] * length, calling)
            cache.put(key, *answer)
            kept = [one for one in kept if one[0] != key]
            if length > 0 and size_of(*answer) <= room:
                kept.append((key, answer))
            while sum(size_of(*one) for _, one in kept) > room:
                del kept[0]
        else:
            known = dict(kept).get(key)
            found = cache.get(key)
            assert (None if found is None else ([*found.token_ids], found.text(""))) == known
            if known is not None:
                kept = [one for one in kept if one[0] != key] + [(key, known)]
        assert len(cache) == len(kept)


def test_short_answers_do_not_fill_the_cache():
    cache = OutputTokenCache(10 * TOKENS_PER_ENTRY)
    for number in range(1_000):
        cache.put(b"%d" % number, [1] * (number % 2))
    assert len(cache) == 9
