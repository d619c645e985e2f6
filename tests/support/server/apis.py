"""The HTTP APIs that generate text: how each writes a request, and how its answers and streams are read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx2
from support.api_server import MODEL, ApiServer

Fields = dict[str, Any]


@dataclass
class Called:
    """A call of a tool. ``arguments``: decoded; where the limit truncated them, a text."""

    id: str
    name: str
    arguments: Any


@dataclass
class Answered:
    """An answer of any API. ``reason``: "stop", "length" or "calls". ``turns``: the client's additions to its
    history, of a whole answer only. ``cached_tokens``: None where the API does not report them."""

    text: str = ""
    reasoning: str = ""
    calls: list[Called] = field(default_factory=list)
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    turns: list[Any] = field(default_factory=list)
    id: str = ""

    @property
    def arguments(self) -> list[Any]:
        return [call.arguments for call in self.calls]


class Api:
    """OpenAI's chat completions, from which the others differ.

    ``names``: the API's own names of sampling parameters. ``nested``: the field that contains them.
    ``id_header``: the header with a request's id."""

    name = "chat"
    path = "/v1/chat/completions"
    prompt_field = "messages"
    names: ClassVar[Fields] = {}
    nested = ""
    reasons: ClassVar[Fields] = {"tool_calls": "calls"}
    id_header = "x-request-id"

    def body(
        self,
        prompt: Any,
        *,
        tools: Sequence[Fields] = (),
        choice: str = "",
        extra: Fields | None = None,
        **common: Any,
    ) -> Fields:
        """A request. ``prompt``: the history, or the text of the user. ``tools``: ``name`` and ``parameters``
        of each. ``choice``: "required", "none" or a tool's name. ``common``: sampling, by OpenAI's names.
        ``extra``: further fields, by the API's own."""
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        sampling = {self.names.get(name, name): value for name, value in common.items()}
        body = {"model": MODEL, self.prompt_field: turns}
        body |= {self.nested: sampling} if self.nested else sampling
        if tools:
            body["tools"] = [self.tool(**tool) for tool in tools]
        if choice:
            body["tool_choice"] = self.choice(choice)
        for name, value in (extra or {}).items():
            body[name] = {**body[name], **value} if name == self.nested else value
        return body

    def tool(self, **function: Any) -> Fields:
        return {"type": "function", "function": function}

    def choice(self, choice: str) -> Any:
        return choice if choice in ("required", "none") else self.tool(name=choice)

    def alone(self, choice: str) -> Fields:
        """The fields by which exactly one call is made."""
        return {"tool_choice": self.choice(choice), "parallel_tool_calls": False}

    def results(self, calls: Sequence[Called], texts: Sequence[str]) -> list[Any]:
        """The turns with the results of calls."""
        return [self.result(call, text) for call, text in zip(calls, texts, strict=True)]

    def result(self, call: Called, text: str) -> Fields:
        return {"role": "tool", "tool_call_id": call.id, "content": text}

    def whole(self, body: Any) -> Answered:
        """The answer in the body of a response."""
        [choice] = body["choices"]
        message, usage = choice["message"], body["usage"]
        calls = [self.called(call["id"], **call["function"]) for call in message.get("tool_calls") or ()]
        return Answered(
            message["content"] or "",
            message.get("reasoning_content", ""),
            calls,
            self.reasons.get(choice["finish_reason"], choice["finish_reason"]),
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            [message],
        )

    def called(self, call_id: str, name: str, arguments: str) -> Called:
        try:
            return Called(call_id, name, json.loads(arguments))
        except ValueError:
            return Called(call_id, name, arguments)

    def streamed(self, text: str) -> Answered:
        """The answer in a stream, put together as a client does."""
        answer, begun = Answered(), {}
        for chunk in events(text):
            for choice in chunk["choices"]:
                delta = choice["delta"]
                answer.text += delta.get("content") or ""
                answer.reasoning += delta.get("reasoning_content") or ""
                for part in delta.get("tool_calls") or ():
                    call = begun.setdefault(part["index"], {"call_id": part.get("id"), "arguments": ""})
                    call["arguments"] += part["function"].get("arguments") or ""
                    call["name"] = part["function"].get("name") or call.get("name")
                if choice["finish_reason"]:
                    answer.reason = self.reasons.get(choice["finish_reason"], choice["finish_reason"])
        answer.calls = [self.called(**begun[index]) for index in sorted(begun)]
        return answer

    def error(self, body: Any) -> tuple[str, str | None]:
        """The code and the field of an error."""
        return body["error"]["code"], body["error"]["param"]


class Text(Api):
    """OpenAI's older completions, of a text."""

    name, path, prompt_field = "completions", "/v1/completions", "prompt"

    def body(self, prompt: Any, **fields: Any) -> Fields:
        return super().body([], **fields) | {"prompt": prompt}

    def whole(self, body: Any) -> Answered:
        [choice] = body["choices"]
        message = {"content": choice["text"]}
        return super().whole({**body, "choices": [{**choice, "message": message}]})

    def streamed(self, text: str) -> Answered:
        answer = Answered()
        for chunk in events(text):
            for choice in chunk["choices"]:
                answer.text += choice["text"]
                answer.reason = choice["finish_reason"] or answer.reason
        return answer


class Responses(Api):
    name, path, prompt_field = "responses", "/v1/responses", "input"
    names: ClassVar[Fields] = {"max_tokens": "max_output_tokens"}

    def tool(self, **function: Any) -> Fields:
        return {"type": "function", **function}

    def result(self, call: Called, text: str) -> Fields:
        return {"type": "function_call_output", "call_id": call.id, "output": text}

    def whole(self, body: Any) -> Answered:
        answer = Answered(turns=body["output"], id=body["id"])
        for item in body["output"]:
            match item["type"]:
                case "message":
                    answer.text += "".join(part["text"] for part in item["content"])
                case "reasoning":
                    answer.reasoning += "".join(part["text"] for part in item["content"])
                case "function_call":
                    answer.calls.append(self.called(item["call_id"], item["name"], item["arguments"]))
        is_cut = body["status"] == "incomplete"
        answer.reason = "length" if is_cut else "calls" if answer.calls else "stop"
        usage = body["usage"]
        answer.prompt_tokens, answer.output_tokens = usage["input_tokens"], usage["output_tokens"]
        answer.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
        return answer

    def streamed(self, text: str) -> Answered:
        found = list(events(text))
        answer = self.whole(found[-1]["response"])
        for kind, whole in (("output_text", answer.text), ("reasoning_text", answer.reasoning)):
            assert "".join(one["delta"] for one in found if one["type"] == f"response.{kind}.delta") == whole
        return answer


class Messages(Api):
    """Anthropic's API."""

    name, path, id_header = "messages", "/v1/messages", "request-id"
    names: ClassVar[Fields] = {"stop": "stop_sequences"}
    reasons: ClassVar[Fields] = {
        "end_turn": "stop",
        "stop_sequence": "stop",
        "max_tokens": "length",
        "tool_use": "calls",
    }

    def body(self, prompt: Any, **fields: Any) -> Fields:
        return super().body(prompt, **{"max_tokens": 300, **fields})

    def tool(self, name: str, parameters: Any = None, **function: Any) -> Fields:
        return {"name": name, "input_schema": parameters or {"type": "object"}, **function}

    def choice(self, choice: str) -> Any:
        modes = {"required": {"type": "any"}, "none": {"type": "none"}}
        return modes.get(choice, {"type": "tool", "name": choice})

    def alone(self, choice: str) -> Fields:
        return {"tool_choice": {**self.choice(choice), "disable_parallel_tool_use": True}}

    def results(self, calls: Sequence[Called], texts: Sequence[str]) -> list[Any]:
        blocks = super().results(calls, texts)
        return [{"role": "user", "content": blocks}] if blocks else []

    def result(self, call: Called, text: str) -> Fields:
        return {"type": "tool_result", "tool_use_id": call.id, "content": text}

    def whole(self, body: Any) -> Answered:
        answer = Answered(turns=[{"role": "assistant", "content": body["content"]}])
        for block in body["content"]:
            match block["type"]:
                case "text":
                    answer.text += block["text"]
                case "thinking":
                    answer.reasoning += block["thinking"]
                case "tool_use":
                    answer.calls.append(Called(block["id"], block["name"], block["input"]))
        answer.reason = self.reasons[body["stop_reason"]]
        usage = body["usage"]
        answer.cached_tokens = usage["cache_read_input_tokens"]
        answer.prompt_tokens = usage["input_tokens"] + answer.cached_tokens
        answer.output_tokens = usage["output_tokens"]
        return answer

    def streamed(self, text: str) -> Answered:
        blocks: list[Fields] = []
        stop_reason, usage = "", {}
        for event in events(text):
            match event:
                case {"type": "content_block_start", "content_block": block}:
                    blocks.append({**block, "written": ""})
                case {"type": "content_block_delta", "delta": {"type": "input_json_delta"} as delta}:
                    blocks[-1]["written"] += delta["partial_json"]
                case {"type": "content_block_delta", "delta": delta}:
                    kind = delta["type"].removesuffix("_delta")
                    if kind in blocks[-1]:
                        blocks[-1][kind] += delta[kind]
                case {"type": "message_delta"}:
                    stop_reason, usage = event["delta"]["stop_reason"], event["usage"]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = self.called("", "", block["written"] or "{}").arguments
        return self.whole({"content": blocks, "stop_reason": stop_reason, "usage": usage})

    def error(self, body: Any) -> tuple[str, str | None]:
        details = body["error"]["details"]
        return details["error_code"], details.get("param")


class OllamaChat(Api):
    name, path, nested = "ollama chat", "/api/chat", "options"
    names: ClassVar[Fields] = {"max_tokens": "num_predict"}
    text_field = ""

    def result(self, call: Called, text: str) -> Fields:
        return {"role": "tool", "tool_name": call.name, "content": text}

    def whole(self, body: Any) -> Answered:
        message = body["message"] if not self.text_field else {**body, "content": body[self.text_field]}
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        calls = [Called(call_id, one["name"], one["arguments"]) for call_id, one in functions]
        reason = body.get("done_reason", "")
        return Answered(
            message["content"],
            message.get("thinking", ""),
            calls,
            "calls" if calls and reason == "stop" else reason,
            body.get("prompt_eval_count", 0),
            None,
            body.get("eval_count", 0),
            [message],
        )

    def streamed(self, text: str) -> Answered:
        parts = [self.whole(json.loads(line)) for line in text.splitlines() if line.strip()]
        answer = Answered(turns=[])
        for part in parts:
            answer.text += part.text
            answer.reasoning += part.reasoning
            answer.calls += part.calls
        last = parts[-1]
        answer.reason = "calls" if answer.calls and last.reason == "stop" else last.reason
        answer.prompt_tokens, answer.output_tokens = last.prompt_tokens, last.output_tokens
        return answer

    def error(self, body: Any) -> tuple[str, str | None]:
        assert isinstance(body["error"], str)
        return body["code"], body["param"]


class OllamaText(OllamaChat):
    name, path, prompt_field, text_field = "ollama generate", "/api/generate", "prompt", "response"

    def body(self, prompt: Any, **fields: Any) -> Fields:
        return super().body([], **fields) | {"prompt": prompt}


class Sglang(Api):
    """SGLang's own API."""

    name, path, prompt_field, nested = "sglang", "/generate", "text", "sampling_params"
    names: ClassVar[Fields] = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}

    def body(self, prompt: Any, **fields: Any) -> Fields:
        return super().body([], **fields) | {"text": prompt}

    def whole(self, body: Any) -> Answered:
        meta = body["meta_info"]
        tokens = [meta[f"{name}_tokens"] for name in ("prompt", "cached", "completion")]
        return Answered(body["text"], "", [], meta["finish_reason"]["type"], *tokens)

    def streamed(self, text: str) -> Answered:
        return self.whole(list(events(text))[-1])


CHAT, TEXT, RESPONSES, MESSAGES = Api(), Text(), Responses(), Messages()
OLLAMA, OLLAMA_TEXT, SGLANG = OllamaChat(), OllamaText(), Sglang()
APIS = {api.name: api for api in (CHAT, TEXT, RESPONSES, MESSAGES, OLLAMA, OLLAMA_TEXT, SGLANG)}


def events(text: str) -> Iterator[Any]:
    """The values of a stream of server-sent events, whose end is marked where the API marks it."""
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def post(server: ApiServer, api: Api, body: Any, *, key: str = "any", path: str = "") -> httpx2.Response:
    """The response to a request. ``path``: another one of the API's. A key goes to servers that want none."""
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.post(f"{server.url}{path or api.path}", json=body, headers=headers, timeout=60)


def ask(
    server: ApiServer, api: Api, prompt: Any, *, stream: bool = False, key: str = "any", **fields: Any
) -> Answered:
    """The answer to a request with the fields of ``Api.body``."""
    response = post(server, api, {**api.body(prompt, **fields), "stream": stream}, key=key)
    assert response.status_code == 200, response.text
    return api.streamed(response.text) if stream else api.whole(response.json())


def refused(
    server: ApiServer, api: Api, body: Any, *, key: str = "any", path: str = ""
) -> tuple[int, str, str | None]:
    """The status, the code and the field of the error."""
    response = post(server, api, body, key=key, path=path)
    assert response.status_code >= 400, response.text
    return response.status_code, *api.error(response.json())
