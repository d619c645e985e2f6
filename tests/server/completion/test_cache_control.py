"""``cache_control`` keeps a prompt's beginning in the cache for its lifetime: which beginning, for how long,
and that it stays when memory is short."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import httpx2
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER, FakeEngine
from support.sent_requests import SentRequests
from support.server.module_servers import module_server

from agentflow.engine.simulator.fake_runner import FakeRunner

Fields: TypeAlias = dict[str, Any]

NUM_SLOTS = 400
SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
PATHS = {"anthropic": "/v1/messages", "openai": "/v1/chat/completions"}


server = module_server()


@pytest.fixture
def sent(server: ApiServer) -> SentRequests:
    return server.observe_requests()


def ask(server: ApiServer, path: str, **fields: Any) -> Fields:
    body = {"model": MODEL, "max_tokens": 1, **fields}
    response = httpx2.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    found: Fields = response.json()
    return found


def marked(text: str, control: Any = None, **fields: Any) -> Fields:
    return {"type": "text", "text": text, **({} if control is None else {"cache_control": control}), **fields}


def kept(sent: SentRequests) -> list[tuple[str, float]]:
    """The texts of the beginnings that the latest request keeps, and their seconds."""
    submit = sent.submits[-1]
    return [
        (TOKENIZER.decode(submit.token_ids[:count], skip_special=False), seconds)
        for count, seconds in submit.origin.kept_prefixes
    ]


SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
ASKED = f"{SYSTEM}One<|im_end|>\n<|im_start|>assistant\n"
ANSWERED = f"{ASKED}Two<|im_end|>\n<|im_start|>user\n"
WHOLE = f"{ANSWERED}Three<|im_end|>\n<|im_start|>assistant\n"


def conversation(system: Any = "Be brief.", contents: Sequence[Any] = ("One", "Two", "Three")) -> Fields:
    """A conversation in Anthropic's form."""
    roles = itertools.cycle(["user", "assistant"])
    turns = [{"role": next(roles), "content": content} for content in contents]
    return {"system": system, "messages": turns}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (conversation(), []),
        (conversation([marked("Be "), marked("brief.", SHORT)]), [(SYSTEM, 300)]),
        (conversation(contents=[[marked("One", LONG)], "Two", "Three"]), [(ASKED, 3600)]),
        (conversation(contents=["One", [marked("Two", SHORT)], "Three"]), [(ANSWERED, 300)]),
        # The longest of the beginnings with one lifetime, and no shorter beginnings that end sooner.
        (
            conversation(
                [marked("Be brief.", LONG)], [[marked("One", SHORT)], "Two", [marked("Three", SHORT)]]
            ),
            [(SYSTEM, 3600), (WHOLE, 300)],
        ),
        (
            conversation([marked("Be brief.", SHORT)], ["One", "Two", [marked("Three", LONG)]]),
            [(WHOLE, 3600)],
        ),
        (conversation() | {"cache_control": LONG}, [(WHOLE, 3600)]),
    ],
)
def test_anthropics_marks_keep_the_prompt_up_to_their_message(
    server: ApiServer, sent: SentRequests, fields: Fields, expected: list[tuple[str, float]]
) -> None:
    ask(server, PATHS["anthropic"], **fields)
    assert kept(sent) == expected


def test_a_mark_at_a_tool_keeps_the_tools_and_the_system_message(
    server: ApiServer, sent: SentRequests
) -> None:
    tool = {"name": "clock", "input_schema": {"type": "object"}, "cache_control": SHORT}
    ask(server, PATHS["anthropic"], tools=[tool], **conversation())
    [(text, seconds)] = kept(sent)
    assert "clock" in text
    assert (text.endswith("<|im_start|>user\n"), seconds) == (True, 300)
    function = {"type": "function", "function": {"name": "clock"}, "cache_control": SHORT}
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"}]
    ask(server, PATHS["openai"], tools=[function], messages=turns)
    [(text, _)] = kept(sent)
    assert "clock" in text
    assert text.endswith("<|im_start|>user\n")


def test_a_mark_at_the_result_of_a_tool_keeps_what_is_before_the_next_one(
    server: ApiServer, sent: SentRequests
) -> None:
    calls = [{"type": "tool_use", "id": number, "name": "clock", "input": {}} for number in "ab"]
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": "noon", "cache_control": SHORT},
        {"type": "tool_result", "tool_use_id": "b", "content": "night"},
    ]
    turns = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": [*results, marked("Three")]},
    ]
    ask(server, PATHS["anthropic"], messages=turns)
    [(text, _)] = kept(sent)
    assert "noon" in text  # this template has results in one turn of the user


@pytest.mark.parametrize(
    ("mark", "seconds"),
    [
        ({"cache_control": SHORT}, 300),
        ({"cache_control": LONG}, 3600),
        ({"prompt_cache_breakpoint": {"mode": "explicit"}}, 1800),
        ({"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}, 43_200),
        ({"cache_control": {"type": "ephemeral", "ttl": "99999999999h"}}, None),
        ({"cache_control": {"type": "forever"}}, None),
        ({"cache_control": {"ttl": 10**30}}, None),
        ({"cache_control": [[]]}, None),
        ({"cache_control": None, "prompt_cache_breakpoint": "here"}, None),
    ],
)
def test_marks_in_openais_messages_are_read_and_what_makes_no_sense_is_ignored(
    server: ApiServer, sent: SentRequests, mark: Fields, seconds: float | None
) -> None:
    content = [{"type": "text", "text": "Be brief.", **mark}]
    turns = [{"role": "system", "content": content}, {"role": "user", "content": "One"}]
    ask(server, PATHS["openai"], messages=turns)
    assert kept(sent) == ([] if seconds is None else [(SYSTEM, seconds)])
    if "cache_control" in mark:
        turns[0] = {"role": "system", "content": "Be brief.", "cache_control": mark["cache_control"]}
        ask(server, PATHS["openai"], messages=turns)
        assert kept(sent) == ([] if seconds is None else [(SYSTEM, seconds)])


def test_thousands_of_marks_are_as_many_beginnings_as_lifetimes(
    server: ApiServer, sent: SentRequests
) -> None:
    blocks = [marked("", LONG if number % 2 else SHORT) for number in range(2000)]
    ask(server, PATHS["anthropic"], **conversation(contents=[[*blocks, marked("One")], "Two", "Three"]))
    assert kept(sent) == [(ASKED, 3600)]
    ask(server, PATHS["anthropic"], **conversation(contents=[*[blocks] * 4, "Three"]))
    assert len(kept(sent)) == 1


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("control", [None, SHORT])
def test_a_kept_beginning_is_cached_after_much_else(path: str, control: Any) -> None:
    runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, num_slots=NUM_SLOTS, max_context=200)
    document = "the a cat " * 10

    def question(text: str, number: int, control: Any) -> list[Fields]:
        return [{"role": "user", "content": [marked(text, control), marked(f" Question {number}")]}]

    with api_server(FakeEngine(runner=runner)) as server:
        ask(server, path, messages=question(document, 1, control))
        for number in range(20):
            ask(server, path, messages=question(f"{number} is another one: {document}", 1, None))
        usage = ask(server, path, messages=question(document, 1, control))["usage"]
        cached = usage.get(
            "cache_read_input_tokens", usage.get("prompt_tokens_details", {}).get("cached_tokens")
        )
        assert (cached > 110) == (control is not None)  # all prompts have 70 tokens in common
        server.assert_idle()
