"""Fakes of the vendors' APIs with batches, built with the types of their clients.

The answer to a request depends on its messages alone, whether it is streamed or in a batch. A test decides
when batches end, and with which results.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

from anthropic.types import Message, TextBlock, Usage
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse, MessageBatchRequestCounts
from openai.types import Batch, BatchError, BatchRequestCounts, FileObject
from openai.types.batch import Errors
from openai.types.chat import ChatCompletion, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import ChoiceLogprobs
from support.apis import anthropic_answers, openai_answers, responses_answers
from support.apis.fake_server import Answer, AnyAnswer, Received

LETTER = ChatCompletionTokenLogprob(token="B", logprob=-0.25, top_logprobs=[])
"""The token of answers in batches of OpenAI that report log-probabilities."""
Fate = Literal["answered", "refused", "expired"]


def words_for(body: dict[str, Any]) -> str:
    """The answer to a request: text, or JSON of its schema. It depends on the messages."""
    number = int(hashlib.sha256(json.dumps(_messages(body)).encode()).hexdigest()[:8], 16)
    schema = _schema(body)
    return f"w{number % 1000}" if schema is None else json.dumps(_instance(schema, number))


def _schema(body: dict[str, Any]) -> dict[str, Any] | None:
    formats = (
        body.get("response_format"),
        body.get("output_config", {}).get("format"),
        body.get("text", {}).get("format"),
    )
    for wanted in formats:
        if wanted is not None:
            return wanted.get("json_schema", wanted)["schema"]  # type: ignore[no-any-return]
    return None


def _instance(schema: dict[str, Any], number: int) -> Any:
    if "enum" in schema:
        return schema["enum"][number % len(schema["enum"])]
    match schema["type"]:
        case "object":
            return {name: _instance(part, number) for name, part in schema["properties"].items()}
        case "integer":
            return number % 100
        case _:
            return f"w{number % 1000}"


class FakeVendor(ABC):
    """A script for ``fake_server``.

    Attributes:
        num_polls: The polls of a batch before it has ended.
        sent: The requests of each batch, in the order of the batches.
        cancelled: The ids of batches that were cancelled.
        fate: Decides about a request of a batch, given its body.
        override: Answers a request itself, unless it returns None.
        words: The text that answers a request, given its body.
    """

    def __init__(self, num_polls: int = 1) -> None:
        self.num_polls = num_polls
        self.sent: list[list[dict[str, Any]]] = []
        self.cancelled: list[str] = []
        self.fate: Callable[[dict[str, Any]], Fate] = lambda body: "answered"
        self.override: Callable[[Received], AnyAnswer | None] = lambda request: None
        self.words: Callable[[dict[str, Any]], str] = words_for
        self.num_asked: dict[str, int] = {}

    def __call__(self, request: Received) -> AnyAnswer:
        found = self.override(request)
        return found if found is not None else self.answer(request)

    @abstractmethod
    def answer(self, request: Received) -> AnyAnswer:
        """The answer of the API."""

    def has_ended(self, batch: str) -> bool:
        """Whether the batch has ended; counts the polls."""
        self.num_asked[batch] = self.num_asked.get(batch, 0) + 1
        return self.num_asked[batch] > self.num_polls

    @property
    @abstractmethod
    def ids(self) -> list[str]:
        """The ids of the batches."""

    @property
    def num_batches(self) -> int:
        """The batches that were sent."""
        return len(self.sent)

    @property
    def prompts(self) -> list[list[str]]:
        """The last messages of the requests of each batch."""
        return [[_text(_messages(body)[-1]) for body in batch] for batch in self.sent]


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = body.get("messages") or body["input"]
    return found


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join([block["text"] for block in content])


def _json(model: Any) -> Answer:
    return Answer(model.to_json(indent=None).encode())


class OpenAIVendor(FakeVendor):
    """OpenAI's chat completions, responses, files and batches."""

    def __init__(self, num_polls: int = 1) -> None:
        super().__init__(num_polls)
        self.batches: list[Batch] = []
        self.refusal: BatchError | None = None  # of all batches
        self._files: dict[str, bytes] = {}

    def answer(self, request: Received) -> AnyAnswer:
        """The answer of the API."""
        path = request.path.partition("?")[0]
        match request.method, path.removeprefix("/v1/").split("/"):
            case "POST", ["chat", "completions"]:
                return openai_answers.text_stream(self.words(request.json))
            case "POST", ["responses"]:
                return responses_answers.text_stream(self.words(request.json))
            case "POST", ["files"]:
                return self._upload(request)
            case "POST", ["batches"]:
                return _json(self._create(request.json))
            case "GET", ["batches"]:
                data = [batch.to_dict(mode="json") for batch in self.batches[::-1]]
                return Answer(json.dumps({"object": "list", "data": data, "has_more": False}).encode())
            case "GET", ["batches", batch]:
                return _json(self._polled(batch))
            case "POST", ["batches", batch, "cancel"]:
                self.cancelled.append(batch)
                return _json(self._find(batch))
            case "GET", ["files", file, "content"]:
                return Answer(self._files[file], content_type="application/octet-stream")
        return openai_answers.error(404, f"no {request.method} {path}")

    @property
    def ids(self) -> list[str]:
        return [batch.id for batch in self.batches]

    def _find(self, batch: str) -> Batch:
        return next(one for one in self.batches if one.id == batch)

    def _upload(self, request: Received) -> Answer:
        boundary = request.headers["content-type"].partition("boundary=")[2]
        _, purpose, file, _ = request.body.split(f"--{boundary}".encode())
        assert b'name="purpose"' in purpose
        assert purpose.rstrip().endswith(b"batch")
        content = file.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
        name = f"file-{len(self._files)}"
        self._files[name] = content
        return _json(
            FileObject(
                id=name,
                bytes=len(content),
                created_at=1,
                filename="requests.jsonl",
                object="file",
                purpose="batch",
                status="processed",
            )
        )

    def _create(self, wanted: dict[str, Any]) -> Batch:
        assert wanted["endpoint"] in ("/v1/chat/completions", "/v1/responses")
        assert wanted["completion_window"] == "24h"
        lines = [json.loads(line) for line in self._files[wanted["input_file_id"]].splitlines() if line]
        assert all((line["method"], line["url"]) == ("POST", wanted["endpoint"]) for line in lines)
        assert len({line["custom_id"] for line in lines}) == len(lines)
        self.sent.append([line["body"] for line in lines])
        batch = Batch(
            id=f"batch_{len(self.batches)}",
            completion_window="24h",
            created_at=int(datetime.now(UTC).timestamp()),
            endpoint=wanted["endpoint"],
            input_file_id=wanted["input_file_id"],
            object="batch",
            status="in_progress",
            metadata=wanted.get("metadata"),
            request_counts=BatchRequestCounts(completed=0, failed=0, total=len(lines)),
        )
        self.batches.append(batch)
        return batch

    def _polled(self, name: str) -> Batch:
        batch = self._find(name)
        if self.refusal is not None:
            batch.status = "failed"
            batch.errors = Errors(data=[self.refusal], object="list")
        elif batch.status == "in_progress" and self.has_ended(name):
            self._end(batch)
        return batch

    def _end(self, batch: Batch) -> None:
        outputs, errors = [], []
        for line in self._files[batch.input_file_id].splitlines():
            if not line:
                continue
            asked = json.loads(line)
            fate = self.fate(asked["body"])
            outcome = {
                "id": f"batch_req_{asked['custom_id']}",
                "custom_id": asked["custom_id"],
                "error": None,
            }
            match fate:
                case "answered":
                    outcome["response"] = {
                        "status_code": 200,
                        "request_id": "r",
                        "body": self._body(asked["body"]),
                    }
                    outputs.append(outcome)
                case "refused":
                    body = json.loads(openai_answers.error(400, "This prompt is bad.").body)  # type: ignore[arg-type]
                    outcome["response"] = {"status_code": 400, "request_id": "r", "body": body}
                    errors.append(outcome)
                case "expired":
                    outcome |= {
                        "response": None,
                        "error": {"code": "batch_expired", "message": "This request could not be executed."},
                    }
                    errors.append(outcome)
                    batch.status = "expired"
        for name, found in (("output", outputs), ("error", errors)):
            if found:
                file = f"file-{name}-{batch.id}"
                # The order of the results is not the order of the requests.
                self._files[file] = b"".join(json.dumps(one).encode() + b"\n" for one in reversed(found))
                setattr(batch, f"{name}_file_id", file)
        batch.request_counts = BatchRequestCounts(
            completed=len(outputs), failed=len(errors), total=len(outputs) + len(errors)
        )
        if batch.status == "in_progress":
            batch.status = "completed"

    def _body(self, asked: dict[str, Any]) -> Any:
        assert "stream" not in asked
        assert "stream_options" not in asked
        if "input" in asked:
            parts = responses_answers.message(self.words(asked)), responses_answers.ending()
            return json.loads(responses_answers.whole(*parts))
        whole = openai_answers.completion(self.words(asked))
        assert isinstance(whole.body, bytes)
        completion = ChatCompletion.model_validate_json(whole.body)
        if asked.get("logprobs"):
            completion.choices[0].logprobs = ChoiceLogprobs(content=[LETTER])
        return completion.to_dict(mode="json", exclude_unset=False)


class AnthropicVendor(FakeVendor):
    """Anthropic's messages and message batches."""

    def __init__(self, num_polls: int = 1) -> None:
        super().__init__(num_polls)
        self.batches: list[MessageBatch] = []
        self._requests: dict[str, list[dict[str, Any]]] = {}
        self._fates: dict[str, list[Fate]] = {}

    def answer(self, request: Received) -> AnyAnswer:
        """The answer of the API."""
        path = request.path.partition("?")[0]
        match request.method, path.removeprefix("/v1/messages").split("/"):
            case "POST", [""]:
                return anthropic_answers.text_stream(self.words(request.json))
            case "POST", ["", "batches"]:
                return _json(self._create(request.json["requests"]))
            case "GET", ["", "batches"]:
                data = [batch.to_dict(mode="json") for batch in self.batches[::-1]]
                return Answer(json.dumps({"data": data, "has_more": False}).encode())
            case "GET", ["", "batches", batch]:
                return _json(self._polled(batch))
            case "POST", ["", "batches", batch, "cancel"]:
                self.cancelled.append(batch)
                return _json(self._find(batch))
            case "GET", ["", "batches", batch, "results"]:
                return Answer(self._results(batch), content_type="application/x-jsonl")
        return anthropic_answers.error(404, f"no {request.method} {path}", kind="not_found_error")

    @property
    def ids(self) -> list[str]:
        return [batch.id for batch in self.batches]

    def _find(self, batch: str) -> MessageBatch:
        return next(one for one in self.batches if one.id == batch)

    def _create(self, requests: list[dict[str, Any]]) -> MessageBatch:
        ids = [request["custom_id"] for request in requests]
        assert len(set(ids)) == len(ids)
        assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", one) for one in ids)
        assert all("stream" not in request["params"] for request in requests)
        self.sent.append([request["params"] for request in requests])
        now = datetime.now(UTC)
        batch = MessageBatch(
            id=f"msgbatch_{len(self.batches)}",
            created_at=now,
            expires_at=now,
            processing_status="in_progress",
            request_counts=self._counts(processing=len(requests)),
            type="message_batch",
        )
        self.batches.append(batch)
        self._requests[batch.id] = requests
        return batch

    def _counts(self, **counts: int) -> MessageBatchRequestCounts:
        names = ("processing", "succeeded", "errored", "canceled", "expired")
        return MessageBatchRequestCounts(**(dict.fromkeys(names, 0) | counts))

    def _polled(self, name: str) -> MessageBatch:
        batch = self._find(name)
        if batch.processing_status == "in_progress" and self.has_ended(name):
            fates = [self.fate(request["params"]) for request in self._requests[name]]
            self._fates[name] = fates
            batch.processing_status = "ended"
            batch.request_counts = self._counts(
                succeeded=fates.count("answered"),
                errored=fates.count("refused"),
                expired=fates.count("expired"),
            )
            batch.results_url = f"https://api.anthropic.com/v1/messages/batches/{name}/results"
        return batch

    def _results(self, name: str) -> bytes:
        lines = []
        for request, fate in reversed(list(zip(self._requests[name], self._fates[name], strict=True))):
            match fate:
                case "answered":
                    message = Message(
                        id="msg_1",
                        type="message",
                        role="assistant",
                        model=anthropic_answers.MODEL,
                        content=[TextBlock(type="text", text=self.words(request["params"]))],
                        stop_reason="end_turn",
                        usage=Usage(input_tokens=9, output_tokens=3),
                    )
                    result: dict[str, Any] = {"type": "succeeded", "message": message.to_dict(mode="json")}
                case "refused":
                    body = json.loads(
                        anthropic_answers.error(400, "This is bad.", kind="invalid_request_error").body  # type: ignore[arg-type]
                    )
                    result = {"type": "errored", "error": body}
                case "expired":
                    result = {"type": "expired"}
            found = MessageBatchIndividualResponse.model_validate(
                {"custom_id": request["custom_id"], "result": result}
            )
            lines.append(found.to_json(indent=None).encode() + b"\n")
        return b"".join(lines)
