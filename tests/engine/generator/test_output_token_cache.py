"""The output token cache against a plain list, and the keys of conversations."""

from __future__ import annotations

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


EVENT = st.tuples(st.booleans(), st.sampled_from([b"a", b"b", b"c", b"d"]), st.integers(0, 6))


@given(st.integers(0, 4 * TOKENS_PER_ENTRY), st.lists(EVENT, max_size=40))
def test_the_least_recently_used_entry_goes_first(room, events):
    cache = OutputTokenCache(room)
    kept: list[tuple[bytes, list[int]]] = []  # the oldest first
    for number, (is_put, key, length) in enumerate(events):
        if is_put:
            token_ids = [number] * length
            cache.put(key, token_ids)
            kept = [one for one in kept if one[0] != key]
            if 0 < length <= room - TOKENS_PER_ENTRY:
                kept.append((key, token_ids))
            while sum(len(ids) + TOKENS_PER_ENTRY for _, ids in kept) > room:
                del kept[0]
        else:
            known = dict(kept).get(key)
            found = cache.get(key)
            assert (None if found is None else [*found]) == known
            if known is not None:
                kept = [one for one in kept if one[0] != key] + [(key, known)]
        assert len(cache) == len(kept)


def test_short_answers_do_not_fill_the_cache():
    cache = OutputTokenCache(10 * TOKENS_PER_ENTRY)
    for number in range(1_000):
        cache.put(b"%d" % number, [1] * (number % 2))
    assert len(cache) == 9
