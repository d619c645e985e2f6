"""The APIs that the blocks of the documentation call: OpenAI's, Anthropic's, and the APIs of servers at the
addresses that pages show. Their model is ``page_model``'s."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.apis import anthropic_answers, openai_answers
from support.apis.batch_vendors import OpenAIVendor
from support.apis.fake_server import Answer, AnyAnswer, FakeServer, Received
from support.docs.page_model import SCRIPT
from support.programs import by_end

OWNERS = {"8000": "vllm", "30000": "sglang", "8080": "llamacpp", "11434": "library"}
"""The owner of the models in the list of the server that pages show at a port."""

OVERLOADED = "gpt-4.1"
"""The model whose vendor is overloaded."""

_answer_to = by_end(SCRIPT)


def _words(body: dict[str, Any]) -> str:
    said = _answer_to(_prompt(body["messages"]))
    return said if isinstance(said, str) else said.text


_batches = OpenAIVendor(num_polls=0)
_batches.words = _words


def answer(request: Received) -> AnyAnswer:
    """The answer of a vendor, or of the server whose port is the first part of the path."""
    if "/batches" in request.path or "/files" in request.path:
        return _batches.answer(request)
    if request.path.endswith("/models"):
        owner = OWNERS[request.path.split("/")[1]]
        return Answer(json.dumps({"object": "list", "data": [{"id": "m", "owned_by": owner}]}).encode())
    if request.path.endswith("/api/show"):
        return Answer(b'{"model_info": {"qwen3.context_length": 40960}}')
    if request.json["model"] == OVERLOADED:
        return Answer(b"{}", 503)
    if request.path.endswith("/embeddings"):
        rows = [{"index": index, "embedding": [0.5, 0.5]} for index, _ in enumerate(request.json["input"])]
        return Answer(json.dumps({"data": rows}).encode())
    text = _words(request.json)
    if request.path.endswith("/messages"):
        return anthropic_answers.text_stream(text)
    if request.json.get("logprobs"):
        likely = [("yes", -0.1), ("no", -2.4)]
        return openai_answers.stream(
            openai_answers.logprob_chunk(text, -0.1, *likely), openai_answers.ending("length")
        )
    return openai_answers.text_stream(text)


def _prompt(messages: list[dict[str, Any]]) -> str:
    """The prompt as the scripted backend has it. The assistant's last message is continued."""
    turns = [f"<{message['role']}>{_text(message['content'])}" for message in messages]
    if messages[-1]["role"] != "assistant":
        turns.append("<assistant>")
    roles = [message["role"] for message in messages]
    return "".join(
        turn + (f"</{role}>" if number + 1 < len(turns) else "")
        for number, (turn, role) in enumerate(zip(turns, [*roles, "assistant"], strict=False))
    )


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "<image>") for part in content)


def use(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the keys and the addresses of the vendors."""
    for vendor, path in (("OPENAI", "/v1"), ("ANTHROPIC", "")):
        monkeypatch.setenv(f"{vendor}_API_KEY", "a key")
        monkeypatch.setenv(f"{vendor}_BASE_URL", server.url + path)


def on_servers(source: str, server: FakeServer) -> str:
    """The source of a block with the addresses of the test's server."""
    for port in OWNERS:
        source = source.replace(f"http://127.0.0.1:{port}", f"{server.url}/{port}")
    return source
