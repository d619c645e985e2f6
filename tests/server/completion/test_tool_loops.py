"""A loop with tools over each API, with a model that puts unusual white space around its calls: each turn
finds all earlier ones in the cache, in the tokens that were generated."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.engine.tool_template_shapes import TEMPLATES, TOKENIZER, WITHOUT_TOOLS
from support.fake_engine import FakeEngine
from support.sent_requests import SentRequests

from agentflow.engine.fake_runner import FakeRunner
from agentflow.engine.messages import Finished, FromEngine
from agentflow.server.tenants.keys import Tenants, hashed_key

pytestmark = pytest.mark.timeout(60)
END = TOKENIZER.encode_markup("</s>")[0]
REPORT = "It is sunny."
OPENINGS = (
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
)
SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "number"}, "city": {"type": "string"}},
    "required": ["days", "city"],
}
MARKED = (
    "Let me look. \n\n "
    '<tool_call>{"name": "weather", "arguments": {"days": 1.0, "city": "Oslo"}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"days": 2, "city": "<|im_end|>"}}</tool_call>\n\n\t'
    '<tool_call>{"name": "weather", "arguments": {"days": 3, "city": "Rome"}}</tool_call>',
)
BARE = (
    '{ "name" :"weather",\n "parameters":{"days" : 1.0,   "city":"Oslo"} }',
    '{"name":"weather","parameters":{"city":"Rome","days":1}}',
)
NOTATIONS = {
    "plain": (WITHOUT_TOOLS["chatml"], MARKED),
    "native": (
        TEMPLATES["hermes"],
        tuple([t.replace("<tool_call>{", "<tool_call>\n{").replace("}</", "}\n</") for t in MARKED]),
    ),
    "native_bare": (TEMPLATES["llama"], BARE),
}


def scripted(script: tuple[str, ...]) -> Callable[[Any], int]:
    """Writes a text of the script for each earlier answer that called tools, then the report."""

    def next_token(tokens: Any) -> int:
        text = TOKENIZER.decode(tokens, skip_special=False, continues=True)
        opening = next(opening for opening in OPENINGS if opening in text)
        before, _, written = text.rpartition(opening)
        num_answers = before.count(opening)
        rest = [*script, REPORT][min(num_answers, len(script))].removeprefix(written)
        return TOKENIZER.encode(rest[0], continues=True)[0] if rest else END

    return next_token


class Exchanges(SentRequests):
    """The requests of a server's engine, and the ends of its answers."""

    def __init__(self, server: ApiServer) -> None:
        super().__init__()
        self.ends: list[Finished] = []
        server.call(server.generator.observe, self)

    def received(self, messages: Sequence[FromEngine]) -> None:
        self.ends += [message for message in messages if isinstance(message, Finished)]

    @property
    def last(self) -> tuple[list[int], Finished]:
        """The prompt of the latest request, and its answer."""
        return list(self.submits[-1].token_ids), self.ends[-1]


def with_tenants(*names: str) -> Tenants:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.toml"
        file.write_text("\n".join([f'[tenants.{name}]\nkeys = ["{hashed_key(name)}"]' for name in names]))
        return Tenants(file=file)


@pytest.fixture(scope="module", params=NOTATIONS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[ApiServer, tuple[str, ...]]]:
    """A server with two tenants, and the script of its model."""
    template, script = NOTATIONS[request.param]
    runner = FakeRunner(
        vocab_size=TOKENIZER.vocab_size,
        num_slots=2**14,
        max_context=4096,
        end_token_ids=(END,),
        next_token=scripted(script),
    )
    engine = FakeEngine(runner=runner, tokenizer=TOKENIZER, template=template)
    with api_server(engine, template=template, tenants=with_tenants("ann", "bob")) as running:
        yield running, script
        running.assert_idle()


@dataclass
class Api:
    """A client of one API. ``ask`` sends the conversation, appends the answer and the results of its calls,
    and returns the cached tokens and the number of calls."""

    server: ApiServer
    question: str
    key: str = "ann"
    anew: bool = False

    def __post_init__(self) -> None:
        self.turns: list[Any] = [{"role": "user", "content": self.question}]

    def post(self, path: str, **fields: Any) -> Any:
        headers = {"authorization": f"Bearer {self.key}"}
        url = f"{self.server.url}{path}"
        response = httpx2.post(url, json=fields, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def ask(self) -> tuple[int | None, int]:
        raise NotImplementedError


class Chat(Api):
    def ask(self) -> tuple[int | None, int]:
        tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
        answer = self.post("/v1/chat/completions", model=MODEL, messages=self.turns, tools=[tool])
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        if self.anew:
            for call in calls:
                function = call["function"]
                function["arguments"] = json.dumps(
                    json.loads(function["arguments"]), sort_keys=True, indent=2
                )
        self.turns.append(message)
        self.turns += [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls]
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], len(calls)


class ChatAnew(Chat):
    """Writes the arguments anew."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.anew = True


class Items(Api):
    """The Responses API, with the items of the conversation."""

    def ask(self) -> tuple[int | None, int]:
        tool = {"type": "function", "name": "weather", "strict": False, "parameters": SCHEMA}
        answer = self.post("/v1/responses", model=MODEL, tools=[tool], **self.fields())
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"} for call in calls
        ]
        self.add(answer, results)
        return answer["usage"]["input_tokens_details"]["cached_tokens"], len(calls)

    def fields(self) -> dict[str, Any]:
        return {"input": self.turns}

    def add(self, answer: Any, results: list[Any]) -> None:
        self.turns += [*answer["output"], *results]


class Previous(Items):
    """The Responses API, which keeps the conversation."""

    def add(self, answer: Any, results: list[Any]) -> None:
        self.turns = results
        self.previous = {"previous_response_id": answer["id"]}

    def fields(self) -> dict[str, Any]:
        return {"input": self.turns, **getattr(self, "previous", {})}


class InConversation(Items):
    """The Responses API with a conversation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.conversation = self.post("/v1/conversations")["id"]

    def add(self, answer: Any, results: list[Any]) -> None:
        self.turns = results

    def fields(self) -> dict[str, Any]:
        return {"input": self.turns, "conversation": self.conversation}


class Anthropic(Api):
    def ask(self) -> tuple[int | None, int]:
        tool = {"name": "weather", "input_schema": SCHEMA}
        answer = self.post("/v1/messages", max_tokens=300, model=MODEL, messages=self.turns, tools=[tool])
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"} for call in calls]
        self.turns.append({"role": "assistant", "content": answer["content"]})
        self.turns.append({"role": "user", "content": results})
        return answer["usage"]["cache_read_input_tokens"], len(calls)


class Ollama(Api):
    """Its usage does not show the cached tokens."""

    def ask(self) -> tuple[int | None, int]:
        tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
        answer = self.post("/api/chat", model=MODEL, messages=self.turns, tools=[tool], stream=False)
        calls = answer["message"].get("tool_calls") or []
        self.turns.append(answer["message"])
        self.turns += [{"role": "tool", "tool_name": "weather", "content": "sunny"} for _ in calls]
        return None, len(calls)


APIS = (Chat, ChatAnew, Items, Previous, InConversation, Anthropic, Ollama)


@pytest.mark.parametrize("api", APIS)
def test_each_turn_finds_all_earlier_ones(served: tuple[ApiServer, tuple[str, ...]], api: type[Api]) -> None:
    server, script = served
    exchanges = Exchanges(server)
    client = api(server, f"How is the weather, {api.__name__}?")
    known: list[int] = []
    for text in (*script, REPORT):
        cached, num_calls = client.ask()
        prompt, end = exchanges.last
        assert end.text == text
        assert num_calls == text.count('"weather"')
        assert prompt[: len(known)] == known
        assert end.cached_tokens >= len(known) - 1 if known else end.cached_tokens < len(prompt)
        assert cached in (end.cached_tokens, None)
        known = prompt + end.token_ids


def test_another_tenant_gets_the_tokens_of_its_own_text(served: tuple[ApiServer, tuple[str, ...]]) -> None:
    server, _ = served
    exchanges = Exchanges(server)
    ann = Chat(server, "Whose tokens are these?")
    ann.ask()
    prompt, end = exchanges.last
    known = prompt + end.token_ids
    bob = Chat(server, "", key="bob")
    bob.turns = [*ann.turns]
    bob.ask()
    assert exchanges.last[0][: len(known)] != known
    assert exchanges.last[1].cached_tokens == 0
    ann.ask()
    assert exchanges.last[0][: len(known)] == known
