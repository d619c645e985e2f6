"""``POST /v1/responses``: OpenAI's Responses API.

A turn is a conversation of items, or continues a stored response or a conversation object. Its response is
one JSON object or a stream of events, or runs in the background.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.grammar.compiler.messages import PartedConstraint
from agentflow.errors import Overloaded, PromptTooLong
from agentflow.protocol.bounds.json_bounds import schema_constraint
from agentflow.protocol.chat import Message
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Usage
from agentflow.protocol.sampling import SamplingParams
from agentflow.runtime.limits import MemoryBudget
from agentflow.server.compatible.field_errors import (
    check_num_logprobs,
    check_unsupported,
    naming_field,
    naming_param,
)
from agentflow.server.compatible.fields import is_given
from agentflow.server.compatible.forms import ANY_OBJECT
from agentflow.server.compatible.images import check_media
from agentflow.server.compatible.sampling import max_answer_tokens, read_nucleus
from agentflow.server.completion.completion import completing
from agentflow.server.completion.engine_run import prompt_ids
from agentflow.server.completion.large_answers import reply_beside, write_beside
from agentflow.server.completion.request import CompletionRequest, names_of_unset
from agentflow.server.completion.streaming import PartWriter, announce, report, stream_completion
from agentflow.server.errors import ApiError, invalid_field, unsupported
from agentflow.server.http.call import ApiCall
from agentflow.server.http.caller import caller_with
from agentflow.server.models.models import TextGenerator
from agentflow.server.openai.request import NO_EFFORT, TEMPERATURE
from agentflow.server.openai.responses.answer import ResponseWriter
from agentflow.server.openai.responses.conversations import (
    EndedTurn,
    append_turn,
    check_room,
    load_conversation,
)
from agentflow.server.openai.responses.items import (
    ItemReader,
    Turns,
    read_items,
    read_tool_choice,
    read_tools,
    references_in,
)
from agentflow.server.openai.responses.stored import send_events, stored_response
from agentflow.server.openai.responses.types import (
    ConversationId,
    InputTokens,
    OutputItem,
    OutputMessage,
    ResponseAnswer,
    ResponseRequest,
    SchemaFormat,
)
from agentflow.server.openai.types import ObjectFormat
from agentflow.server.responses.background import BackgroundRun, EventLog
from agentflow.server.responses.item import Item
from agentflow.server.responses.store import History, StoredConversation, StoredResponse

logger = logging.getLogger(__name__)

_LOGPROBS = "message.output_text.logprobs"
# The memory of a background response in addition to its request, items and events.
_RUN_BYTES = 20_000
_UNSUPPORTED = {
    "moderation": "the server does not moderate",
    "prompt": "the server stores no prompts; send instructions",
}


async def create_response(call: ApiCall) -> None:
    """Answers a turn of a conversation."""
    body = await call.process(call.read, ResponseRequest)
    generator = call.text_generator(body.model, body, priority=body.priority)
    _check_fields(body)
    if body.store is not False:
        call.service.responses.check_answers()
    turn = await _read_turn(call, body, generator)
    if body.background:
        await _run_in_background(call, turn, generator)
        return
    with _naming_fields(generator):
        caller = caller_with(call.caller, cache_key=body.prompt_cache_key)
        async with completing(generator, turn.request, caller=caller, on_cut=call.record.count) as completion:
            if body.stream:
                await stream_completion(call, completion, turn.writer, turn.store)
                return
            await PartWriter(call, turn.writer).write(await completion.rest())
    await turn.store()
    report(call, completion)
    await reply_beside(call, turn.num_logprobs, lambda: turn.writer.answer)


async def count_input_tokens(call: ApiCall) -> None:
    """Counts the tokens of a turn's prompt without running the model."""
    body = await call.process(call.read, ResponseRequest)
    generator = call.generator(body.model, to_generate=False)
    _check_fields(body)
    turn = await _read_turn(call, body, generator)
    async with generator.metered():
        with _naming_fields(generator):
            token_ids = await prompt_ids(generator, turn.request)
    call.record.prompt_tokens = len(token_ids)
    await call.reply(InputTokens(input_tokens=len(token_ids)))


async def _read_turn(call: ApiCall, body: ResponseRequest, generator: TextGenerator) -> _Turn:
    """The turn of a request, truncated if the request asks for it."""
    turn = await call.process(_Turn, call, body, generator, await _before(call, body))
    if body.truncation == "auto" and isinstance(generator, EngineGenerator):
        with _naming_fields(generator):
            turn.request = await _truncated(generator, turn.request)
    return turn


def _naming_fields(generator: TextGenerator) -> AbstractContextManager[None]:
    return naming_field(generator, "input", "text.format.schema", "parameters", effort="reasoning.effort")


async def _run_in_background(call: ApiCall, turn: _Turn, generator: TextGenerator) -> None:
    """Starts the response. Answers when its request is accepted, or streams its events."""
    writer, streams = turn.writer, bool(turn.body.stream)
    parts = PartWriter(call, writer)
    caller = caller_with(call.caller, cache_key=turn.body.prompt_cache_key)
    memory = MemoryBudget(within=call.service.bodies.of(call.tenant.name))
    memory.reserve(_RUN_BYTES + call.num_body_bytes + sum([item.num_bytes for item in turn.input_items]))
    run = BackgroundRun(
        writer.answer.id,
        call.tenant.name,
        memory,
        lambda: writer.body,
        turn.input_items,
        EventLog() if streams else None,
        call.has_valid_key,
    )

    async def generate(accept: Callable[[], None]) -> None:
        with _naming_fields(generator):
            async with completing(generator, turn.request, caller=caller) as completion:
                await completion.until_accepted()
                run.num_prompt_tokens = completion.num_prompt_tokens
                announce(call, completion)
                run.write(writer.queue())
                await turn.begin()
                accept()
                while deltas := await completion.next():
                    run.write(await parts.write(deltas))
                report(call, completion)

    async def finish(failure: ApiError | None, is_cancelled: bool) -> None:
        end = writer.cancel if is_cancelled else partial(writer.end, Usage())
        if failure is not None:
            end = partial(writer.fail, failure.shortened())
        last = await write_beside(call, parts.num_logprobs, end)
        run.write(last, is_last=True)
        await turn.store(run.events)

    try:
        await call.service.background.start(run, generate, finish)
    finally:
        call.record.prompt_tokens = run.num_prompt_tokens
    if run.events is None:
        await call.reply(run.body)
    else:
        await send_events(call, run.events)


@dataclass(frozen=True, slots=True)
class _Before:
    """The stored response or conversation that a turn continues. At most one of the first two is set."""

    conversation: StoredConversation | None
    history: History | None
    items: Mapping[str, Item]  # the items that the turn refers to, by id


async def _before(call: ApiCall, body: ResponseRequest) -> _Before:
    """Finds the response or conversation that the turn continues. ``ApiError`` if it does not exist."""
    conversation, history = await load_conversation(call, body.conversation), None
    if body.previous_response_id is not None:
        if conversation is not None:
            raise invalid_field("conversation", "it excludes 'previous_response_id'")
        history = await _find_history(call, body.previous_response_id)
    references = await call.process(references_in, body.input)
    items = await call.service.responses.find_items(call.tenant.name, references) if references else {}
    return _Before(conversation, history, items)


class _Turn:
    """The request in the common form of all APIs, and its response. ``ApiError``, with the field, for a field
    that is wrong or not supported."""

    def __init__(
        self, call: ApiCall, body: ResponseRequest, generator: TextGenerator, continued: _Before
    ) -> None:
        self.body = body
        self._call = call
        self._tenant, self._responses = call.tenant.name, call.service.responses
        before: Sequence[Message] = ()
        self._history, self._conversation = continued.history, continued.conversation
        if self._conversation is not None:
            before = self._conversation.messages
        elif self._history is not None:
            before = self._history.messages()
        param = "conversation" if self._history is None else "previous_response_id"
        for message in before:  # they may have been read for another model
            check_media(param, generator.capabilities, message.images)
        given = read_items(body.input)
        if not given and not before:
            raise invalid_field("input", "it is empty: give a text or at least one item")
        if self._conversation is not None:
            check_room(len(self._conversation.items) + len(given), "conversation")
        self._reader = ItemReader(generator.capabilities, continued.items.get)
        turns, items = Turns(before), []
        for number, raw in enumerate(given):
            items.append(self._reader.read(raw, f"input[{number}]"))
            turns.add(items[-1], f"input[{number}]")
        self.input_items = tuple(items)
        self._messages = tuple(turns.messages)
        # A call may have been added to the last message before this turn.
        is_grown = bool(before) and self._messages[len(before) - 1] is not before[-1]
        self._new_messages = self._messages[len(before) :]
        if is_grown:
            self._history, self._new_messages = None, self._messages
        params = _read_sampling(body, generator)
        effort = None if body.reasoning is None else body.reasoning.effort
        tools = read_tools(body.tools or ())
        instructions = (Message("system", body.instructions),) if body.instructions else ()
        self.request = CompletionRequest(
            (*instructions, *self._messages),
            params,
            constraint=_read_form(body),
            tools=tools,
            tool_choice=read_tool_choice(
                body.tool_choice, has_tools=bool(tools), parallel=body.parallel_tool_calls
            ),
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            max_prompt_tokens=call.service.http_limits.max_prompt_tokens,
            reasons=None if effort is None else effort not in NO_EFFORT,
            effort=effort,
            unset=names_of_unset(
                max_tokens=body.max_output_tokens, temperature=body.temperature, top_p=body.top_p
            ),
        )
        answer = _begun(call.service.new_id("resp"), body, generator.capabilities.model, params)
        answer.conversation = None if self._conversation is None else ConversationId(self._conversation.id)
        self.writer = ResponseWriter(answer, has_logprobs=params.wants_logprobs)

    @property
    def num_logprobs(self) -> int:
        """The log-probabilities of the response so far, with alternatives."""
        return sum(
            [
                len(part.logprobs) + sum([len(token.top_logprobs) for token in part.logprobs])
                for item in self.writer.answer.output
                if isinstance(item, OutputMessage)
                for part in item.content
            ]
        )

    async def begin(self) -> None:
        """Registers a background response, so that other servers find it."""
        body = msgspec.json.encode(self.writer.answer)
        begun = StoredResponse(self.writer.answer.id, body, None, self.input_items, (), is_background=True)
        await self._responses.begin(self._tenant, begun)

    async def store(self, events: EventLog | None = None) -> None:
        """Stores the response for later turns, unless ``store`` is false, and appends the turn to its
        conversation. ``events``: the events of a background response that is streamed."""
        try:
            await self._store(events)
        except Overloaded as error:  # the answer itself is complete
            logger.warning("the response %s is not stored: %s", self.writer.answer.id, error)

    async def _store(self, events: EventLog | None) -> None:
        answer, message = self.writer.answer, self.writer.message()
        has_answer = answer.status in ("completed", "incomplete")
        if self._conversation is None and self.body.store is False:
            return
        output_items, body = await write_beside(self._call, self.num_logprobs, self._written)
        if self._conversation is not None and has_answer:
            turn = EndedTurn(self.input_items, output_items, message)
            await append_turn(self._responses, self._tenant, self._conversation.id, turn)
        if self.body.store is False:
            return
        await self._responses.add(
            self._tenant,
            StoredResponse(
                answer.id,
                body,
                History(self._history, (*self._new_messages, message)) if has_answer else None,
                self.input_items,
                output_items,
                is_background=answer.background,
                events=events,
            ),
        )

    def _written(self) -> tuple[tuple[Item, ...], bytes]:
        """The items of the answer, and the whole answer."""
        answer = self.writer.answer
        return tuple([self._output_item(item) for item in answer.output]), msgspec.json.encode(answer)

    def _output_item(self, item: OutputItem) -> Item:
        """An item of the answer, with all of its fields."""
        read = self._reader.read(msgspec.Raw(msgspec.json.encode(item)), "output")
        return Item.made(item.id, item, read.step)


async def _find_history(call: ApiCall, response_id: str) -> History:
    """The conversation up to the end of an earlier response."""
    param = "previous_response_id"
    found = None
    if call.service.background.find(call.tenant.name, response_id) is None:
        found = await stored_response(call, response_id, param, to_continue=True)
    if found is None or found.runs_on is not None:
        raise invalid_field(param, "this response is still running: wait until it has ended")
    history = found.history
    if history is None:
        raise invalid_field(param, "this response failed or was cancelled, so it cannot be continued")
    return history


def _check_fields(body: ResponseRequest) -> None:
    check_unsupported(body, _UNSUPPORTED)
    if body.background and body.store is False:
        raise invalid_field("store", "a background response is stored")
    if body.stream_options is not None:
        if not body.stream:
            raise invalid_field("stream_options", "it needs 'stream' to be true")
        if body.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "events are not padded")


def _read_sampling(body: ResponseRequest, generator: TextGenerator) -> SamplingParams:
    top_p, top_k = read_nucleus(body.top_p)
    wants_logprobs = bool(body.top_logprobs) or _LOGPROBS in (body.include or ())
    params = SamplingParams(
        max_tokens=body.max_output_tokens or max_answer_tokens(generator),
        temperature=TEMPERATURE if body.temperature is None else body.temperature,
        top_p=top_p,
        top_k=top_k,
        seed=body.seed,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs or 0,
    )
    with naming_param():
        params.check()
    check_num_logprobs(params, generator, 1, "top_logprobs")
    return params


def _read_form(body: ResponseRequest) -> Constraint | None:
    match body.text.format if body.text is not None else None:
        case ObjectFormat():
            return ANY_OBJECT
        case SchemaFormat(schema=schema, strict=is_strict):
            constraint = schema_constraint(schema, "text.format.schema")
            return constraint if is_strict else PartedConstraint.relaxable(constraint)
    return None


def _begun(response_id: str, body: ResponseRequest, model: str, params: SamplingParams) -> ResponseAnswer:
    """The response before its first item."""
    text: dict[str, Any] = {"format": {"type": "text"}}
    if body.text is not None:
        shown = msgspec.json.decode(msgspec.json.encode(body.text))
        text |= {key: value for key, value in shown.items() if value is not None}
    choice = body.tool_choice
    return ResponseAnswer(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        model=model,
        output=[],
        usage=None,
        incomplete_details=None,
        completed_at=None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        store=body.store is not False,
        temperature=params.temperature,
        text=text,
        tool_choice=choice if is_given(choice) else "auto",
        tools=list(body.tools or ()),
        top_logprobs=params.top_logprobs,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        background=bool(body.background),
    )


async def _truncated(generator: EngineGenerator, request: CompletionRequest) -> CompletionRequest:
    """The request without as many of its oldest turns as is necessary to make room for an answer."""
    assert isinstance(request.prompt, tuple)
    room = generator.limits.max_tokens(request.max_prompt_tokens)

    def without(number: int) -> CompletionRequest:
        return replace(request, prompt=(*kept_always, *turns[starts[number] :]))

    async def fits(number: int) -> bool:
        try:
            return len(await prompt_ids(generator, without(number))) < room
        except PromptTooLong:
            return False

    kept_always = [message for message in request.prompt if message.role == "system"]
    turns = [message for message in request.prompt if message.role != "system"]
    # A turn begins with the user: calls and their results stay together.
    starts = [n for n, message in enumerate(turns) if message.role == "user"] or [0]
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    return request if low == 0 else without(low)
