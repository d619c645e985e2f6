"""A loop with tools over each API, with a model that puts unusual white space around its calls: each turn
finds all earlier ones in the cache, in the tokens that were generated."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.api_server import ApiServer, api_server
from support.engine.tool_template_shapes import TEMPLATES, TOKENIZER, WITHOUT_TOOLS
from support.fake_engine import FakeEngine
from support.sent_requests import SentRequests
from support.server.apis import CHAT, MESSAGES, OLLAMA, RESPONSES, Answered, Api, ask, post

from agentflow.engine.messages import Finished, FromEngine
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.server.tenants.keys import Tenants, hashed_key

pytestmark = pytest.mark.timeout(60)
END = TOKENIZER.encode_markup("</s>")[0]
REPORT = "It is sunny."
OPENINGS = ("<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n")
PROPERTIES = {"days": {"type": "number"}, "city": {"type": "string"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["days", "city"]}
TOOLS = [{"name": "weather", "parameters": SCHEMA}]
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
        text = TOKENIZER.decode(tokens.tolist(), skip_special=False, continues=True)
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


class Client:
    """A conversation over an API. ``ask`` sends it, and appends the answer and the results of its calls."""

    def __init__(self, server: ApiServer, api: Api, question: str, key: str = "ann") -> None:
        self.server, self.api, self.key = server, api, key
        self.turns: list[Any] = [{"role": "user", "content": question}]
        self.extra: dict[str, Any] = {}

    def ask(self) -> Answered:
        fields = {"tools": TOOLS, "max_tokens": 300, "extra": self.extra}
        answer = ask(self.server, self.api, self.turns, key=self.key, **fields)
        self.add(answer, self.api.results(answer.calls, ["sunny"] * len(answer.calls)))
        return answer

    def add(self, answer: Answered, results: list[Any]) -> None:
        self.turns += [*answer.turns, *results]


class Rewriting(Client):
    """Writes the arguments of calls differently."""

    def add(self, answer: Answered, results: list[Any]) -> None:
        for call in answer.turns[0].get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, sort_keys=True, indent=2)
        super().add(answer, results)


class Continuing(Client):
    """The server keeps the conversation by its latest response."""

    def add(self, answer: Answered, results: list[Any]) -> None:
        self.turns = results
        self.extra = {"previous_response_id": answer.id}


class InConversation(Client):
    """The server keeps the conversation as an object."""

    def ask(self) -> Answered:
        if not self.extra:
            made = post(self.server, self.api, {}, key=self.key, path="/v1/conversations").json()
            self.extra = {"conversation": made["id"]}
        return super().ask()

    def add(self, answer: Answered, results: list[Any]) -> None:
        self.turns = results


CLIENTS = [
    *[(Client, api) for api in (CHAT, RESPONSES, MESSAGES, OLLAMA)],
    *[(Rewriting, CHAT), (Continuing, RESPONSES), (InConversation, RESPONSES)],
]


@pytest.mark.parametrize(
    ("kind", "api"), CLIENTS, ids=[f"{kind.__name__} {api.name}" for kind, api in CLIENTS]
)
def test_each_turn_finds_all_earlier_ones(
    served: tuple[ApiServer, tuple[str, ...]], kind: type[Client], api: Api
) -> None:
    server, script = served
    exchanges = Exchanges(server)
    client = kind(server, api, f"How is the weather, {kind.__name__} {api.name}?")
    known: list[int] = []
    for text in (*script, REPORT):
        answer = client.ask()
        prompt, end = exchanges.last
        assert end.text == text
        assert len(answer.calls) == text.count('"weather"')
        assert prompt[: len(known)] == known
        assert end.cached_tokens >= len(known) - 1 if known else end.cached_tokens < len(prompt)
        assert answer.cached_tokens in (end.cached_tokens, None)
        known = prompt + end.token_ids


def test_another_tenant_gets_the_tokens_of_its_own_text(served: tuple[ApiServer, tuple[str, ...]]) -> None:
    server, _ = served
    exchanges = Exchanges(server)
    ann = Client(server, CHAT, "Whose tokens are these?")
    ann.ask()
    prompt, end = exchanges.last
    known = prompt + end.token_ids
    bob = Client(server, CHAT, "", key="bob")
    bob.turns = [*ann.turns]
    bob.ask()
    assert exchanges.last[0][: len(known)] != known
    assert exchanges.last[1].cached_tokens == 0
    ann.ask()
    assert exchanges.last[0][: len(known)] == known
