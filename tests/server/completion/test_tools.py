"""Tools over each API that has them: calls, whole and streamed, their results, stops, and truncated calls."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from support.api_server import ApiServer
from support.fake_engine import TOKENIZER
from support.server.apis import CHAT, MESSAGES, OLLAMA, RESPONSES, Api, ask
from support.server.module_servers import module_fixture
from support.server.openai_peer import any_text_server
from support.server.scripted_model import scripted_server

pytestmark = pytest.mark.timeout(60)
ASKED: list[Any] = [{"role": "user", "content": "How is the weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA},
    {"name": "now", "parameters": NOTHING},
]
CALLS = (
    'Let me look.\n<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    '\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
)
BOTH = [{"city": "Oslo"}, {"city": "Rome"}]
REPORT = "Oslo: sunny. Rome: rain."
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def over(*apis: Api) -> Any:
    return pytest.mark.parametrize("api", apis, ids=[api.name for api in apis])


COMPARED = "1 <"


def scripted(before: str) -> str:
    if "compare" in before:
        return COMPARED
    return REPORT if "sunny" in before else CALLS


server = module_fixture(scripted_server, scripted)
"""Its model calls the weather tool twice, and reports when it has a result."""


any_text = pytest.fixture(any_text_server, scope="module")


@STREAMS
@over(CHAT, RESPONSES, MESSAGES, OLLAMA)
def test_calls_and_their_results(server: ApiServer, api: Api, stream: bool) -> None:
    requests = server.observe_requests()
    whole = ask(server, api, ASKED, tools=TOOLS)
    first = ask(server, api, ASKED, tools=TOOLS, stream=stream)
    assert (first.text.strip(), first.reason) == ("Let me look.", "calls")
    assert [call.name for call in first.calls] == ["weather", "weather"]
    assert first.arguments == BOTH
    assert len({call.id for call in first.calls}) == 2
    history = [*ASKED, *whole.turns, *api.results(whole.calls, ["sunny", "rain"])]
    second = ask(server, api, history, tools=TOOLS, stream=stream)
    assert (second.text, second.calls, second.reason) == (REPORT, [], "stop")
    assert requests.prompt.index("sunny") < requests.prompt.index("rain")


@STREAMS
@pytest.mark.parametrize("choice", ["required", "weather"])
@over(CHAT, RESPONSES, MESSAGES)
def test_a_required_call_fits_its_schema(any_text: ApiServer, api: Api, choice: str, stream: bool) -> None:
    for seed in (1, 2):
        extra = {"seed": seed, **api.alone(choice)}
        answer = ask(any_text, api, ASKED, tools=TOOLS[:1], stream=stream, extra=extra, max_tokens=300)
        assert (answer.text, answer.reason) == ("", "calls")
        [call] = answer.calls
        assert call.name == "weather"
        jsonschema.validate(call.arguments, SCHEMA)


@STREAMS
@over(CHAT, RESPONSES, MESSAGES)
def test_tools_that_may_not_be_called(server: ApiServer, api: Api, stream: bool) -> None:
    answer = ask(server, api, ASKED, tools=TOOLS, choice="none", stream=stream)
    assert (answer.calls, answer.reason) == ([], "stop")


@STREAMS
@over(CHAT, MESSAGES, OLLAMA)
def test_f31b_no_stop_applies_inside_a_call(server: ApiServer, api: Api, stream: bool) -> None:
    """Half of a call would be another call."""
    answer = ask(server, api, ASKED, tools=TOOLS, stop=["Oslo", '"', "}}", "<", "call>"], stream=stream)
    assert (answer.arguments, answer.reason) == (BOTH, "calls")
    prose = ask(server, api, ASKED, tools=TOOLS, stop=["me"], stream=stream)
    assert (prose.text, prose.calls, prose.reason) == ("Let ", [], "stop")


@STREAMS
@over(CHAT, MESSAGES, OLLAMA)
def test_f37_a_stop_that_might_have_begun_a_call_ends_the_answer(
    server: ApiServer, api: Api, stream: bool
) -> None:
    asked = [{"role": "user", "content": "Please compare."}]
    most = len(TOKENIZER.encode(COMPARED))
    answer = ask(server, api, asked, tools=TOOLS, stop=["<"], max_tokens=most, stream=stream)
    assert (answer.text, answer.calls, answer.reason) == ("1 ", [], "stop")


@over(CHAT, RESPONSES, MESSAGES, OLLAMA)
def test_a_truncated_answer_is_accepted_as_history(server: ApiServer, api: Api) -> None:
    """Its end shows that it was truncated. In Ollama's and Anthropic's APIs, arguments are objects."""
    found: list[Any] = []
    for max_tokens in range(1, len(TOKENIZER.encode(CALLS)), 29):
        answer = ask(server, api, ASKED, tools=TOOLS, max_tokens=max_tokens)
        assert answer.reason == "length"
        assert "Let me look.".startswith(answer.text.strip())
        streamed = ask(server, api, ASKED, tools=TOOLS, max_tokens=max_tokens, stream=True)
        assert streamed.reason == "length"
        if api is not MESSAGES:  # its client parses the beginning of an object
            assert streamed.arguments == answer.arguments
        results = api.results(answer.calls, ["sunny"] * len(answer.calls))
        assert ask(server, api, [*ASKED, *answer.turns, *results], tools=TOOLS, max_tokens=5).output_tokens
        found += answer.arguments
    assert BOTH[0] in found
    texts = {arguments for arguments in found if isinstance(arguments, str)}
    assert bool(texts) == (api in (CHAT, RESPONSES))
    assert all('{"city": "Oslo"}'.startswith(text) or '{"city": "Rome"}'.startswith(text) for text in texts)
    assert all(arguments in ({}, *BOTH) for arguments in found if not isinstance(arguments, str))
