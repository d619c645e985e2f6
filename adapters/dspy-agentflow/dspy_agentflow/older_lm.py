"""``AgentflowLM`` for DSPy 3.0 to 3.3, which uses OpenAI's API through LiteLLM.

The class replaces DSPy's call of LiteLLM. ``_asked_of`` converts a request; ``_response_of``, ``_chunk_of``
and ``_litellm_errors`` convert answers and errors.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, Final

import anyio
import anyio.from_thread
import dspy
import litellm
import pydantic
from litellm import exceptions
from litellm.types import utils

import agentflow as af
from agentflow.integrations import (
    Answer,
    Delta,
    ModelConnection,
    TextPiece,
    ToolChoice,
    ToolSpec,
    describe_tool,
    read_reply,
)
from dspy_agentflow.answers import Asked, acomplete, astream, complete, stream, tokens_of
from dspy_agentflow.call_notes import CallNotes, notes
from dspy_agentflow.lm import DEFAULT_MAX_TOKENS, BaseAgentflowLM, EngineSettings, is_cache_scope

_PARAMS: Final = ("max_tokens", "temperature", "top_p", "stop", "n", "seed", "response_format", "tools")


class AgentflowLM(BaseAgentflowLM):
    __doc__ = BaseAgentflowLM.__doc__

    supports_function_calling = True
    supports_response_schema = True
    supports_reasoning = False
    supported_params = frozenset((*_PARAMS, "tool_choice", "parallel_tool_calls", "logprobs"))

    def _engine_options(self, settings: EngineSettings) -> dict[str, Any]:
        self.engine_settings = settings
        return {}

    def dump_state(self) -> dict[str, Any]:
        """Returns the state to save, without the API key. DSPy before 3.3 loads it as a plain ``dspy.LM``:
        set the LM again after loading."""
        state: dict[str, Any] = super().dump_state()
        for name in ("provider", "finetuning_model", "launch_kwargs", "train_kwargs"):
            state.pop(name, None)
        state = {name: value for name, value in state.items() if not is_cache_scope(name)}
        return {**state, **self.engine_settings.dump(), "follow_adapter": self.follow_adapter}

    def _get_cached_completion_fn(self, completion_fn: Any, cache: Any) -> Any:
        """Replaces DSPy's call of LiteLLM."""
        ours = self._acomplete if inspect.iscoroutinefunction(completion_fn) else self._complete
        return super()._get_cached_completion_fn(ours, cache)

    def _complete(self, request: dict[str, Any], num_retries: int, cache: Any = None) -> Any:
        with _litellm_errors(self.model):
            answers = [self._answers(asked, request) for asked in self._asked(request, num_retries)]
        return _response_of(list(chain(*answers)))

    async def _acomplete(self, request: dict[str, Any], num_retries: int, cache: Any = None) -> Any:
        with _litellm_errors(self.model):
            answers = [await self._aanswers(asked, request) for asked in self._asked(request, num_retries)]
        return _response_of(list(chain(*answers)))

    def _answers(self, asked: Asked, request: dict[str, Any]) -> list[Answer]:
        connection, listener = self._connection(request), dspy.settings.send_stream
        if listener is None:
            return complete(connection, asked)
        answers = []
        with closing(stream(connection, asked)) as events:
            for event in events:
                if isinstance(event, Answer):
                    answers.append(event)
                elif (chunk := self._chunk(event)) is not None:
                    anyio.from_thread.run(listener.send, chunk)
        return sorted(answers, key=lambda answer: answer.index)

    async def _aanswers(self, asked: Asked, request: dict[str, Any]) -> list[Answer]:
        connection, listener = self._connection(request), dspy.settings.send_stream
        if listener is None:
            return await acomplete(connection, asked)
        answers = []
        async with aclosing(astream(connection, asked)) as events:
            async for event in events:
                if isinstance(event, Answer):
                    answers.append(event)
                elif (chunk := self._chunk(event)) is not None:
                    await listener.send(chunk)
        return sorted(answers, key=lambda answer: answer.index)

    def _asked(self, request: dict[str, Any], num_retries: int) -> list[Asked]:
        asked = _asked_of(copy.copy(request), self.engine_settings, notes())
        is_streamed = dspy.settings.send_stream is not None
        return [
            replace(one, is_streamed=is_streamed and one.n == 1, max_retries=num_retries) for one in asked
        ]

    def _connection(self, request: dict[str, Any]) -> ModelConnection:
        return self.engine_settings.connection(request["model"])

    def _chunk(self, delta: Delta) -> Any:
        predict = dspy.settings.caller_predict
        return _chunk_of(delta, self.model, id(predict) if predict else None)


_SAMPLING: Final = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "logprobs": "logprobs",
    "top_logprobs": "top_logprobs",
    "stop": "stop",
}
_CONSTRAINTS: Final = ("regex", "choices", "grammar")
_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls")
_ELSEWHERE: Final = ("model", "messages", "n", "num_generations", "rollout_id", "response_format")


def _asked_of(request: Mapping[str, Any], settings: EngineSettings, notes: CallNotes) -> list[Asked]:
    """Converts a request to one call with ``n`` answers, or to one call per answer if there is a seed. Raises
    ``BadArgument`` for unknown parameters."""
    request = {name: value for name, value in request.items() if value is not None}
    unknown = request.keys() - _SAMPLING.keys() - set(_CONSTRAINTS) - set(_TOOLS) - set(_ELSEWHERE)
    if unknown:
        raise af.errors.BadArgument(f"there is no parameter {', '.join(sorted(unknown))}")
    sampling: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS}
    sampling |= {name: request[key] for key, name in _SAMPLING.items() if key in request}
    tools = [describe_tool(tool) for tool in request.get("tools", ())]
    own = {name: request[name] for name in _CONSTRAINTS if name in request}
    # With tools, the adapter parses calls and free text.
    found = None if own or tools else notes.answer_format
    wanted = {} if tools else _wanted(request.get("response_format"))
    asked: dict[str, Any] = {
        "messages": [_turn(message) for message in request["messages"]],
        "tools": tools,
        "choice": _choice(request, tools, notes.must_call),
        "constraint": own or (wanted if found is None else found.constraint()),
        "answer_format": found,
        "cache_salt": settings.cache_salt,
        "deadline_s": settings.timeout,
    }
    n = request.get("n", 1)
    if "seed" not in sampling:
        return [Asked(sampling=sampling, n=n, **asked)]
    seeds = [notes.seed(sampling["seed"], number) for number in range(n)]
    return [Asked(sampling={**sampling, "seed": seed}, **asked) for seed in seeds]


def _wanted(response_format: Any) -> dict[str, Any]:
    if response_format is None:
        return {}
    if isinstance(response_format, type) and issubclass(response_format, pydantic.BaseModel):
        return {"schema": response_format.model_json_schema()}
    if response_format.get("type") == "json_schema":
        return {"schema": response_format["json_schema"]["schema"]}
    return {"schema": {"type": "object"}}


def _choice(request: Mapping[str, Any], tools: list[ToolSpec], must_call: bool) -> ToolChoice:
    if not tools:
        return ToolChoice("none")
    parallel = request.get("parallel_tool_calls") is not False
    asked = request.get("tool_choice", "auto")
    if isinstance(asked, Mapping):
        return ToolChoice("required", asked["function"]["name"], parallel=parallel)
    return ToolChoice("required" if must_call and asked == "auto" else asked, parallel=parallel)


def _turn(message: Mapping[str, Any]) -> af.Message:
    calls = [_call(call["id"], **call["function"]) for call in message.get("tool_calls") or ()]
    role = "system" if message["role"] == "developer" else message["role"]
    return af.Message(
        role,
        _text(message.get("content")),
        tool_calls=tuple(calls),
        tool_call_id=message.get("tool_call_id"),
        name=message.get("name") if role == "tool" else None,
    )


def _call(call_id: str, name: str, arguments: str) -> af.ToolCall:
    try:
        # Written again as constrained decoding does, so that the cache finds the same tokens again.
        return af.ToolCall(name, json.loads(arguments), call_id)
    except (ValueError, RecursionError):
        return af.ToolCall(name, {}, call_id, arguments)


def _text(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    for block in content:
        if block.get("type") != "text":
            raise af.errors.NotSupported(
                f"content of type {block.get('type')!r} is not supported: this model takes text only"
            )
    return "".join([block["text"] for block in content])


_KINDS: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], Any], ...]] = (
    (af.PromptTooLong, exceptions.ContextWindowExceededError),
    (af.errors.UnknownModel, exceptions.NotFoundError),
    (af.errors.NotAuthorized, exceptions.AuthenticationError),
    (af.errors.RateLimited, exceptions.RateLimitError),
    (af.DeadlineExceeded, exceptions.Timeout),
    ((af.errors.ServerUnreachable, af.ServerLost), exceptions.APIConnectionError),
    (af.errors.NotSupported, exceptions.UnsupportedParamsError),
    ((af.errors.ServerError, af.errors.EngineFailed), exceptions.InternalServerError),
    (af.AgentflowError, exceptions.BadRequestError),
)


@contextmanager
def _litellm_errors(model: str) -> Iterator[None]:
    """Converts agentflow's errors that are raised in the block."""
    try:
        yield
    except af.AgentflowError as error:
        kind: Any = next(kind for known, kind in _KINDS if isinstance(error, known))
        raise kind(message=str(error), model=model, llm_provider="agentflow") from error


def _response_of(answers: Sequence[Answer]) -> Any:
    """Returns the response with all answers to one prompt."""
    usage: dict[str, Any] = {
        "prompt_tokens": sum(answer.usage.prompt_tokens for answer in answers),
        "completion_tokens": sum(answer.usage.output_tokens for answer in answers),
        "prompt_tokens_details": {"cached_tokens": sum(answer.usage.cached_tokens for answer in answers)},
    }
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    return litellm.ModelResponse(
        model=answers[0].model,
        choices=[_choice_of(index, answer) for index, answer in enumerate(answers)],
        usage=litellm.Usage(**usage),
    )


def _choice_of(index: int, answer: Answer) -> dict[str, Any]:
    reply = read_reply(answer.text)
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
        for call in reply.tool_calls
    ]
    reason = "length" if answer.finish_reason == "length" else "tool_calls" if calls else "stop"
    message = {"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})}
    return {"index": index, "finish_reason": reason, "message": message, **_logprobs(answer)}


def _logprobs(answer: Answer) -> dict[str, Any]:
    if answer.logprobs is None:
        return {}
    content = []
    for token, logprob, place in tokens_of(answer):
        likely = [{"token": one.text, "logprob": one.logprob, "bytes": None} for one in place]
        content.append({"token": token, "logprob": logprob, "bytes": None, "top_logprobs": likely})
    return {"logprobs": {"content": content}}


def _chunk_of(delta: Delta, model: str, predict_id: int | None) -> Any:
    """Returns the chunk for DSPy's stream listener; None for deltas other than text."""
    if not isinstance(delta.piece, TextPiece):
        return None
    content = utils.Delta(content=delta.piece.text, role="assistant")
    choice = utils.StreamingChoices(index=delta.index, delta=content)
    chunk = litellm.ModelResponseStream(model=model, choices=[choice])
    if predict_id is not None:
        chunk.predict_id = predict_id
    return chunk
