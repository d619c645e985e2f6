"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, as Anthropic's API has them."""

from __future__ import annotations

from agentflow.errors import BadArgument, PromptTooLong, RequestRefused
from agentflow.server.anthropic.answer import AnswerEvents, AnswerFrame
from agentflow.server.anthropic.anthropic_request import completion_of, prompt_of, read_request
from agentflow.server.anthropic.types import CountAnswer, CountRequest, MessagesRequest
from agentflow.server.completion.completion import Completion, completing
from agentflow.server.completion.request import AnswerEnded, CompletionDelta
from agentflow.server.http.call import ApiCall
from agentflow.server.http.errors import Refusal


async def create_message(call: ApiCall) -> None:
    """Goes on with a conversation."""
    body = await call.beside(read_request, call, MessagesRequest)
    generator = call.generator(body.model, priority=body.priority)
    request = await call.beside(completion_of, call, body)
    capabilities = generator.capabilities
    frame = AnswerFrame.new(capabilities.model, body.max_tokens, capabilities.max_context)
    deltas: list[CompletionDelta] = []
    try:
        async with completing(generator, request) as completion:
            if body.stream:
                await _stream(call, completion, frame)
                return
            while some := await completion.next():
                deltas += some
    except PromptTooLong as error:
        # Agents that shorten their conversation know its cause by these words.
        text = f"prompt is too long: {error}"
        raise Refusal(400, "context_length_exceeded", text, param="messages") from error
    except (BadArgument, RequestRefused) as error:
        if error.param == "constraint":
            error.param = "output_config.format.schema"
        raise
    answer = frame.whole(deltas)
    _record(call, deltas[-1])
    await call.reply(answer)


async def _stream(call: ApiCall, completion: Completion, frame: AnswerFrame) -> None:
    """What the request is refused with is raised before the status is sent."""
    await completion.until_accepted()
    events = AnswerEvents(frame, completion.num_prompt_tokens)
    async with call.streaming():
        await call.send_events(events.start())
        while deltas := await completion.next():
            is_over = isinstance(deltas[-1], AnswerEnded)
            _record(call, deltas[-1])
            await call.send_events(events.write(deltas), last=is_over)


async def count_tokens(call: ApiCall) -> None:
    """How many tokens the prompt has. Nothing is run."""
    body = await call.beside(read_request, call, CountRequest)
    generator = call.generator(body.model, to_generate=False)
    request = await call.beside(prompt_of, body)
    with generator.metered():
        token_ids = await Completion(generator, request).prompt_ids()
    call.record.prompt_tokens = len(token_ids)
    await call.reply(CountAnswer(len(token_ids)))


def _record(call: ApiCall, last: CompletionDelta) -> None:
    if isinstance(last, AnswerEnded):
        record, usage = call.record, last.usage
        record.prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        record.output_tokens = usage.output_tokens
