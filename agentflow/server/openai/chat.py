"""``POST /v1/chat/completions``: continues a conversation, as OpenAI's API does.

The answer is one JSON object, or a stream of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentflow.engine.grammar.compiler.messages import PartedConstraint
from agentflow.protocol.bounds.json_bounds import schema_constraint
from agentflow.protocol.constraint import Constraint
from agentflow.server.compatible.field_errors import (
    check_num_logprobs,
    check_unsupported,
    naming_field,
    naming_param,
)
from agentflow.server.compatible.fields import is_given
from agentflow.server.compatible.forms import ANY_OBJECT
from agentflow.server.compatible.logprobs import token_logprob
from agentflow.server.completion.completion import completing
from agentflow.server.completion.large_answers import (
    AnswerMemory,
    answer_memory,
    count_logprobs,
    reply_beside,
)
from agentflow.server.completion.request import (
    Answer,
    AnswerEnded,
    AnswerToken,
    CompletionDelta,
    CompletionRequest,
    PromptDelta,
    ReasoningDelta,
    TextDelta,
    ToolArguments,
    ToolCallBegun,
    names_of_unset,
)
from agentflow.server.completion.streaming import report, stream_completion
from agentflow.server.errors import invalid_field, unsupported
from agentflow.server.http.call import ApiCall
from agentflow.server.http.caller import caller_with, read_priority, read_salt
from agentflow.server.models.models import TextGenerator
from agentflow.server.openai.answer import (
    AnswerIdentity,
    ChunkWriter,
    UsageChunks,
    encode_json,
    list_prompt_ids,
    make_prompt_logprobs,
    usage_body,
)
from agentflow.server.openai.request import (
    NO_EFFORT,
    check_fields,
    find_kept,
    read_constraint,
    read_conversation,
    read_sampling,
    read_template_values,
    read_tool_choice,
    read_tools,
)
from agentflow.server.openai.types import (
    AnsweredFunction,
    AnsweredToolCall,
    AnswerMessage,
    AssistantMessage,
    ChatAnswer,
    ChatChoice,
    ChatRequest,
    ChoiceLogprobs,
    ObjectFormat,
    SchemaFormat,
)

_KIND = "chat.completion.chunk"
_WHY_UNSUPPORTED = {
    "echo": "the answer of a conversation is its next turn; /v1/completions supports it",
    "audio": "the models generate no audio",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "web_search_options": "the server does not search the web",
    "moderation": "the server does not moderate",
}
_NEUTRAL = {"echo": False}


async def create_chat_completion(call: ApiCall) -> None:
    """Continues a conversation."""
    with answer_memory(call) as memory:
        await _answer(call, memory)


async def _answer(call: ApiCall, memory: AnswerMemory) -> None:
    body = await call.process(call.read, ChatRequest)
    generator = call.text_generator(body.model, body, priority=read_priority(body.priority, body.nvext))
    form, request = await call.process(_make_request, call, body, generator)
    identity = AnswerIdentity.new("chatcmpl", generator.capabilities.model)
    has_logprobs = request.params.wants_logprobs
    with naming_field(generator, "messages", form, effort=_reasoning_field(body)):
        caller = caller_with(call.caller, body.nvext, body.prompt_cache_key)
        async with completing(
            generator, request, caller=caller, on_cut=call.record.count, on_scored=memory.reserve
        ) as completion:
            if body.stream:
                chunks = _ChatChunks(identity, request.n, usage=UsageChunks.of(body, completion))
                await stream_completion(call, completion, chunks)
                return
            answers = await completion.answers()
    report(call, completion)

    def answer() -> ChatAnswer:
        return ChatAnswer(
            id=identity.id,
            created=identity.created,
            model=identity.model,
            system_fingerprint=identity.system_fingerprint,
            choices=[_choice(n, answer, body, has_logprobs) for n, answer in enumerate(answers)],
            usage=usage_body(completion.usage),
            prompt_logprobs=make_prompt_logprobs(answers[0], body.prompt_logprobs),
            prompt_token_ids=list_prompt_ids(answers[0]) if body.return_token_ids else msgspec.UNSET,
        )

    await reply_beside(call, count_logprobs(answers), answer)


def check_chat_fields(body: ChatRequest, max_n: int) -> None:
    """``ApiError`` for a field that is not supported, or is wrong. ``max_n``: the limit of answers."""
    check_fields(body, max_n)
    check_unsupported(body, _WHY_UNSUPPORTED, _NEUTRAL)


def _make_request(
    call: ApiCall, body: ChatRequest, generator: TextGenerator
) -> tuple[str, CompletionRequest]:
    """Returns the field of the constraint, and the request in the common form of all APIs. ``ApiError``, with
    the field, for a field that is wrong or not supported."""
    limits = call.service.http_limits
    check_chat_fields(body, limits.max_n)
    tools = read_tools(body.tools or ())
    choice = read_tool_choice(body.tool_choice, has_tools=bool(tools), parallel=body.parallel_tool_calls)
    max_tokens = body.max_completion_tokens or body.max_tokens
    params = read_sampling(body, generator, max_tokens, _top_logprobs(body))
    check_num_logprobs(params, generator, body.n or 1, "top_logprobs")
    with naming_param():
        form, constraint = read_constraint(body, _response_format(body))
    _check_turns(body)
    return form, CompletionRequest(
        read_conversation(body.messages, generator.capabilities),
        params,
        constraint=constraint,
        tools=tools,
        tool_choice=choice,
        n=body.n or 1,
        cache_salt=read_salt(body.cache_salt, body.nvext),
        priority=read_priority(body.priority, body.nvext),
        kept=find_kept(body.messages, body.tools or ()),
        max_prompt_tokens=limits.max_prompt_tokens,
        opens_turn=body.add_generation_prompt is not False,
        template_values=read_template_values(body.chat_template_kwargs),
        returns_prompt=body.prompt_logprobs is not None or bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs,
        reasons=_asks_to_reason(body),
        reasoning_budget=_reasoning_budget(body),
        effort=body.reasoning_effort,
        unset=names_of_unset(max_tokens=max_tokens, temperature=body.temperature, top_p=body.top_p),
    )


def _asks_to_reason(body: ChatRequest) -> bool | None:
    """Whether the model reasons before its answer; None: the chat template decides."""
    if body.enable_thinking is not None or body.reasoning_effort is None:
        return body.enable_thinking
    return body.reasoning_effort not in NO_EFFORT


def _reasoning_field(body: ChatRequest) -> str:
    """The field that sets the reasoning, for errors."""
    for name in ("reasoning_effort", "enable_thinking", "thinking_token_budget", "thinking_budget"):
        if getattr(body, name) is not None:
            return name
    return "reasoning_effort"


def _reasoning_budget(body: ChatRequest) -> int | None:
    if body.thinking_token_budget is not None and body.thinking_budget is not None:
        raise invalid_field("thinking_budget", "it excludes 'thinking_token_budget': give one of them")
    budget = body.thinking_token_budget
    return body.thinking_budget if budget is None else budget


def _top_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_field("top_logprobs", "it needs 'logprobs' to be true")
    return (body.top_logprobs or 0) if body.logprobs else None


def _response_format(body: ChatRequest) -> Constraint | None:
    match body.response_format:
        case ObjectFormat():
            return ANY_OBJECT
        case SchemaFormat(json_schema=spec):
            if spec.schema is None or not is_given(spec.schema):
                return ANY_OBJECT
            constraint = schema_constraint(spec.schema, "response_format")
            return constraint if spec.strict else PartedConstraint.relaxable(constraint)
    return None


def _check_turns(body: ChatRequest) -> None:
    """``ApiError`` if a field asks for anything but the next turn."""
    is_own = isinstance(body.messages[-1], AssistantMessage)
    if body.continue_final_message and not is_own:
        raise invalid_field("continue_final_message", "the last message is not the assistant's")
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid_field("add_generation_prompt", "it excludes 'continue_final_message'")
    if is_own and body.continue_final_message is False:
        text = "a last message of the assistant is continued; append the user's"
        raise unsupported("continue_final_message", text)


def _choice(index: int, answer: Answer, body: ChatRequest, has_logprobs: bool) -> ChatChoice:
    calls = [
        AnsweredToolCall(id=called.id, function=AnsweredFunction(called.name, called.arguments))
        for called in answer.tool_calls
    ]
    content = None if calls and not answer.text else answer.text
    return ChatChoice(
        index=index,
        message=AnswerMessage(
            role="assistant",
            content=content,
            refusal=None,
            tool_calls=calls,
            reasoning_content=answer.reasoning or None,
        ),
        logprobs=_logprobs(answer.tokens) if has_logprobs else None,
        finish_reason=answer.finish_reason,
        token_ids=[*answer.token_ids] if body.return_token_ids else msgspec.UNSET,
    )


class _ChatChunks(ChunkWriter):
    def __init__(self, identity: AnswerIdentity, n: int, *, usage: UsageChunks) -> None:
        super().__init__(identity, _KIND, "delta", n, usage=usage)
        self._text_fronts = [front + b'{"content":' for front in self.fronts]
        self._reasoning_fronts = [front + b'{"reasoning_content":' for front in self.fronts]
        self._is_begun = [False] * n

    def prepare(self, usage: bytes) -> None:
        """Encodes the rest of the next chunks, which follows their text."""
        super().prepare(usage)
        self._text_rest = b"}" + self.rest

    def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The events of these deltas."""
        self.show_usage()
        parts: list[bytes] = []
        for delta in deltas:
            if isinstance(delta, PromptDelta):
                continue
            if not self._is_begun[delta.index]:
                parts.append(self._role(delta))
            if isinstance(delta, TextDelta | ReasoningDelta):
                fronts = self._text_fronts if isinstance(delta, TextDelta) else self._reasoning_fronts
                parts += (fronts[delta.index], encode_json(delta.text))
                parts.append(self._with_logprobs(delta.tokens) if delta.tokens else self._text_rest)
            elif isinstance(delta, AnswerEnded):
                parts += (self.fronts[delta.index], b'{},"logprobs":null,"finish_reason":')
                parts += (encode_json(delta.finish_reason), self.tail)
            else:
                parts += (self.fronts[delta.index], _tool_call(delta), self.rest)
        return b"".join(parts)

    def _role(self, delta: CompletionDelta) -> bytes:
        self._is_begun[delta.index] = True
        content = b"null" if isinstance(delta, ToolCallBegun) else b'""'
        return (
            self.fronts[delta.index]
            + b'{"role":"assistant","content":%b,"refusal":null}' % content
            + self.rest
        )

    def _with_logprobs(self, tokens: Sequence[AnswerToken]) -> bytes:
        logprobs = encode_json(_logprobs(tokens))
        return b'},"logprobs":' + logprobs + b',"finish_reason":null' + self.tail


def _tool_call(delta: ToolCallBegun | ToolArguments) -> bytes:
    if isinstance(delta, ToolArguments):
        return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (
            delta.call,
            encode_json(delta.text),
        )
    begun = {
        "index": delta.call,
        "id": delta.id,
        "type": "function",
        "function": {"name": delta.name, "arguments": ""},
    }
    return encode_json({"tool_calls": [begun]})


def _logprobs(tokens: Sequence[AnswerToken]) -> ChoiceLogprobs:
    return ChoiceLogprobs(content=[token_logprob(token) for token in tokens])
