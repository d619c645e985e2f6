"""The engine's interface to the interpreter: a ``Generator`` whose contexts are token ids.

Forks and turns are therefore exact to the token. The generator compiles constraints, and sends requests
(``requests``) through an ``EngineClient``. The HTTP endpoints use it, too, with one generator per tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import Any

import msgspec

from agentflow.engine.client import EngineClient, OnProgress, RequestObserver, texts_to
from agentflow.engine.generator.ahead import PrefixesAhead
from agentflow.engine.generator.context import (
    EngineContext,
    OutputTokenCache,
    fill_conversation,
    fill_cost,
    num_chars,
    number_of_name,
)
from agentflow.engine.generator.decide import decide
from agentflow.engine.generator.embedding import EngineEmbedder
from agentflow.engine.generator.prompt_changes import PromptChanges
from agentflow.engine.generator.requests import MediaPreparer, TenantRequests
from agentflow.engine.generator.select import score
from agentflow.engine.grammar.compiler.compiler import ConstraintCompiler
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.messages import EngineStats, Finished, Progress
from agentflow.engine.request import Origin, TopTokens, check_request
from agentflow.engine.runner import RunnerInfo
from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.engine.tenant import ANONYMOUS, RequestGate, Tenant
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.reasoning import AnswerText, ReasoningFormat, reasoning_marks
from agentflow.engine.text.state.rendered_prefixes import RenderedPrefixes
from agentflow.engine.text.state.token_state import TokenState
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.text.tool_output import CallMarks
from agentflow.engine.text.tools import ReplyText
from agentflow.engine.watching.view import EngineView
from agentflow.errors import BadArgument, error_param
from agentflow.protocol.chat import Conversation, Message, ToolChoice, ToolSpec, read_reply
from agentflow.protocol.constraint import CONSTRAINT_KINDS, Constraint
from agentflow.protocol.decisions import Question
from agentflow.protocol.events import Capabilities, Stats, TokenLogprob, TopLogprobs
from agentflow.protocol.images import Image, Video
from agentflow.protocol.sampling import GenParams, SamplingParams
from agentflow.runtime.generator import (
    METER,
    Decided,
    EmbeddingOptions,
    Embeddings,
    Generated,
    OnText,
    Scored,
    StateHint,
)
from agentflow.runtime.loop_turns import LoopTurn


class EngineGenerator:
    """A ``Generator`` on a running engine. One engine serves many sessions and many of these generators.

    Args:
        client: the engine.
        template: the chat template.
        name: the model's public name, if it differs from the engine's.
        adapter: the name of the loaded adapter that requests use; empty: none.
        tenant: the owner of the requests and of their cache.
        gate: limits the requests of the tenant; None: no limits.
        use_hints: send the structure of the program to the engine: which requests continue one state, which
            are siblings, and which states will be forked.
        compiler: compiles constraints; None: they are not supported.
        patience_s: a request that has waited this long is admitted before others of its tenant and priority.
        embedding: the settings of a model that makes embeddings, such as its prompts.
        reader: prepares images and videos for the model; None: it has no vision.
    """

    def __init__(
        self,
        client: EngineClient,
        template: ChatTemplate,
        *,
        name: str | None = None,
        adapter: str = "",
        tenant: Tenant = ANONYMOUS,
        gate: RequestGate | None = None,
        use_hints: bool = True,
        compiler: ConstraintCompiler | None = None,
        patience_s: float | None = None,
        embedding: EmbeddingFolder | None = None,
        reader: MediaPreparer | None = None,
    ) -> None:
        info = client.info
        reader = reader if info.reads_media else None
        self.patience_s = patience_s
        self.template = template
        self.tenant = tenant
        self.capabilities = Capabilities(
            model=name or info.model,
            roles=template.has_template,
            conversations=template.has_template,
            max_context=min(info.max_context, info.num_slots),
            watch=True,
            constraints=() if compiler is None else CONSTRAINT_KINDS,
            embedding_models=(name or info.model,) if info.embedding_size else (),
            batch_size=info.batch_size,
            default_max_tokens=SamplingParams().max_tokens,
            generates=not info.embedding_size,
            images=reader is not None,
            videos=reader is not None and bool(reader.video_token),
        )
        self.requests = TenantRequests(client, tenant, gate, self.capabilities.model, reader)
        self.limits = self.requests.limits
        self.embedder = EngineEmbedder(self.requests, embedding)
        self.output_token_cache = OutputTokenCache()
        self.rendered_prefixes = RenderedPrefixes(client.tokenizer)
        self._ahead = PrefixesAhead(self.requests) if use_hints else None
        self._client = client
        self._adapter = adapter
        self._reasoning = reasoning_marks(template.source)
        self._prompt_changes = PromptChanges()
        self._compiler = compiler
        self._stats = self.requests.stats

    @property
    def info(self) -> RunnerInfo:
        """The model and its memory."""
        return self._client.info

    @property
    def embedding_size(self) -> int:
        """The dimensions of the model's embeddings; 0: it generates text."""
        return self._client.info.embedding_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._client.tokenizer

    def open(
        self,
        cache_salt: str,
        *,
        program: str = "",
        label: str = "",
        priority: int = 0,
        patience_s: float | None = None,
        trace: str = "",
        template_values: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> EngineContext:
        """Returns a context for an empty state.

        Args:
            cache_salt: states with different salts do not share cache.
            program: states of the same program have one consumer, and so form a task group.
            label: as in ``Origin``; by default the program.
            priority: of the state's requests, within the tenant.
            patience_s: as for the generator.
            trace: as in ``Origin``.
            template_values: further variables of the chat template.
            max_tokens: a far longer prompt is rejected before it is encoded; by default the model's limit.
        """
        origin = Origin(
            self.tenant.name,
            cache_salt,
            state=self._new_number(),
            task_group=number_of_name(program) if program and self._ahead is not None else 0,
            weight=self.tenant.weight,
            priority=priority,
            patience_s=patience_s,
            trace=trace,
            label=label or program,
            adapter=self._adapter,
        )
        template = self.template.with_values(template_values or {})
        check = partial(self.limits.check_texts, max_tokens=max_tokens)
        tokens = TokenState(self._client.tokenizer, template, check)
        tokens.placeholder_tokens = self.requests.placeholder_tokens
        return EngineContext(tokens, origin, self.limits)

    def fill(self, context: EngineContext, text: str) -> None:
        """Appends text, to be encoded later. Raises ``PromptTooLong`` if no output would fit after it."""
        context.fill(text)

    def begin_role(
        self, context: EngineContext, role: str, tool_call_id: str | None = None, name: str | None = None
    ) -> None:
        """Opens a turn under the chat template. Raises ``PromptTooLong`` for more turns than the context has
        tokens."""
        context.begin_role(role, tool_call_id, name)

    def end_role(self, context: EngineContext) -> None:
        """Closes the turn."""
        context.end_role()

    def image(self, context: EngineContext, image: Image) -> None:
        """Appends an image, which is read before the text after it is encoded."""
        context.medium(image)

    def video(self, context: EngineContext, video: Video) -> None:
        """Appends a video, which is read before the text after it is encoded."""
        context.medium(video)

    async def converse(self, context: EngineContext, conversation: Conversation) -> None:
        """Writes the conversation into an empty context and opens the assistant's turn. Raises the errors of
        ``context.fill_conversation``."""
        if context.tokens.continues:
            raise BadArgument("a conversation must come first: this state already has content")
        self.limits.check_length(num_chars(conversation))
        await self.fill_conversation(context, conversation)

    async def offer_tools(
        self, context: EngineContext, tools: tuple[ToolSpec, ...], choice: ToolChoice
    ) -> None:
        """Replaces the tools that replies may call, in a worker thread if there are many. Raises the errors
        of ``converse``."""
        offered = Conversation((), tools, choice)
        self.limits.check_length(num_chars(offered))
        await self.requests.run_off_loop(fill_cost(offered), context.offer_tools, self.template, offered)

    async def fill_conversation(
        self, context: EngineContext, conversation: Conversation, *, opens_turn: bool = True
    ) -> None:
        """``context.fill_conversation``, in a worker thread if the conversation is long."""
        fill = partial(
            fill_conversation,
            context,
            conversation,
            context.tokens.template,
            self.output_token_cache,
            opens_turn=opens_turn,
        )
        await self.requests.run_off_loop(fill_cost(conversation), fill)

    def keep(self, context: EngineContext, beginnings: Sequence[tuple[int, float]]) -> None:
        """Keeps beginnings of the context's conversation in the cache after its next request, as far as
        memory allows. ``beginnings``: for each, the number of its messages, and the seconds."""
        if self._ahead is not None:
            context.kept_messages = beginnings

    async def keep_answer(self, context: EngineContext, end: Finished) -> None:
        """Keeps the tokens of the context and of the answer generated after it for conversations whose text
        begins with theirs."""
        amount = context.tokens.num_settled + len(end.token_ids)
        await self.requests.run_off_loop(amount, context.tokens.keep_answer, end.token_ids, end.text)

    async def reply(
        self,
        context: EngineContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        """Generates the assistant's reply, which may call the conversation's tools. The result has the text
        of the reply; the context gets the generated tokens.

        Args:
            context: the state.
            params: the sampling parameters.
            on_text: called with new text.
            constraint: of the answer, or None.
            on_reasoning: called with new reasoning.
        """
        sampling = params.resolved()
        reasoning_format = await self._reasoning_format(context, sampling, constraint, replies=True)
        text = ReplyText(context.tools, constraint, reasoning_format)
        if text.constraint is not None and text.constraint is not constraint:  # of the tools
            self.capabilities.require(text.constraint)
        on_progress = _reporting(text, on_text, on_reasoning)
        calls = None if context.tools is None else context.tools.marks
        end = await self.complete(
            context, sampling, on_progress, text.constraint, reasoning_format=reasoning_format, calls=calls
        )
        context.tokens.generated(end.token_ids, end.text)
        is_truncated = end.finish_reason == "length"
        notation = text.finish(end.text, end.answer_at, is_truncated=is_truncated)
        reply = read_reply(notation)
        self.output_token_cache.put_answer(context, end, reply.message())
        context.conversation_key = None  # its next reply answers a longer conversation
        reasoning = str(text.reasoning)
        if reply.tool_calls:
            context.tokens.called(msgspec.structs.replace(reply.message(), reasoning=reasoning or None))
        return _generated(end, sampling, self.tokenizer, notation, reasoning)

    async def generate(
        self,
        context: EngineContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        """Generates text, and appends the generated ids. Reasoning is not part of the text. The arguments are
        as for ``reply``."""
        sampling = params.resolved()
        reasoning_format = await self._reasoning_format(context, sampling, constraint, replies=False)
        text = None if reasoning_format is None else AnswerText(reasoning_format)
        on_progress = texts_to(on_text) if text is None else _reporting(text, on_text, on_reasoning)
        end = await self.complete(
            context, sampling, on_progress, constraint, reasoning_format=reasoning_format
        )
        context.tokens.generated(end.token_ids, end.text)
        answer, reasoning = end.text, ""
        if text is not None:
            answer, reasoning = text.finish(end.text, end.answer_at), str(text.reasoning)
        generated = _generated(end, sampling, self.tokenizer, answer, reasoning)
        start = len(end.text) - len(answer)
        forced = tuple([(first - start, length) for first, length in end.forced if first >= start])
        return msgspec.structs.replace(generated, forced=forced) if forced else generated

    async def _reasoning_format(
        self, context: EngineContext, params: SamplingParams, constraint: Constraint | None, *, replies: bool
    ) -> ReasoningFormat | None:
        """Returns how the output for a program may begin with reasoning. By default a model does not reason
        before a constraint, so that reasoning does not use up the tokens of a short form."""
        if self._reasoning is None:
            return None
        await self.requests.encode(context)
        default = None if constraint is None else 0
        budget = default if params.max_reasoning_tokens is None else params.max_reasoning_tokens
        return context.reasoning_format(budget, replies=replies)

    async def complete(
        self,
        context: EngineContext,
        params: SamplingParams,
        on_progress: OnProgress,
        constraint: Constraint | None = None,
        on_sent: Callable[[], None] | None = None,
        reasoning_format: ReasoningFormat | None = None,
        on_compiled: Callable[[CompiledConstraint], None] | None = None,
        calls: CallMarks | None = None,
    ) -> Finished:
        """Generates after the context, which does not change.

        Args:
            context: the state.
            params: the sampling parameters.
            on_progress: called with the progress of each step.
            constraint: of the text, of a kind that the model has; or None.
            on_sent: called when the request is in the engine's queue, after all checks that are possible
                before it runs.
            reasoning_format: how the output may begin with reasoning, with a budget.
            on_compiled: called with the compiled constraint.
            calls: the marks of tool calls, inside which no stop applies.
        """
        if reasoning_format is not None:
            reasoning_format = msgspec.structs.replace(
                reasoning_format, strips=constraint is None or constraint.has_free_text
            )
        async with self.requests.admitted(context) as admitted:
            if context.num_unencoded_chars:
                self.limits.check_length(context.num_unencoded_chars)
            token_ids = await self.requests.prompt_ids(context)
            if context.outline is not None:
                context.changed = self._prompt_changes.reason(context.outline, context.tokens.text_keys)
                context.outline = None
            compiled = None
            if constraint is not None and self._compiler is not None:
                with error_param("constraint"):
                    compiled = await self._compiler.compile(constraint, tenant=self.tenant.name)
                    compiled = compiled.limited(constraint)
                if on_compiled is not None:
                    on_compiled(compiled)

            meter = METER.get()

            def hear(progress: Progress) -> None:
                num_tokens = len(progress.token_ids) - progress.num_dropped
                admitted.output_tokens += num_tokens
                if meter is not None:
                    meter(num_tokens)
                on_progress(progress)

            if params.logit_bias or len(token_ids) >= self.limits.most_tokens:
                check_request(len(token_ids), params, self._client.info)
            self.requests.begin(admitted, len(token_ids), context)
            end = await self._client.generate(
                token_ids,
                params,
                seed=params.seed or 0,
                origin=context.origin_now(),
                on_progress=hear,
                constraint=compiled,
                jump_forward=constraint is None or constraint.jump_forward,
                on_sent=on_sent,
                reasoning_format=reasoning_format,
                calls=calls,
            )
            self.requests.done(admitted, end.usage)
        context.tokens.num_computed = len(token_ids) + len(end.token_ids)
        return end

    async def score_prompt(self, context: EngineContext, num_top: int) -> Finished:
        """Returns the log-probability of each token of the context except the first, given all tokens before
        it, with the ``num_top`` likeliest tokens at its position. All tokens are computed, and then
        cached."""
        async with self.requests.admitted(context) as admitted:
            token_ids = await self.requests.prompt_ids(context)
            self.requests.begin(admitted, len(token_ids), context)
            end = await self._client.score(token_ids, 1, num_top=num_top, origin=context.origin_now())
            self.requests.done(admitted, end.usage)
        context.tokens.num_computed = len(token_ids) - 1
        return end

    async def score(self, context: EngineContext, choices: Sequence[str], method: str) -> Scored:
        """Scores all choices, by the tokens after their common beginning. The chosen one is appended with the
        scored ids."""
        return await score(self.requests, context, choices, method)

    async def decide(
        self, context: EngineContext, questions: Sequence[Question], *, max_tokens: int | None = None
    ) -> Decided:
        """Scores the answers to all questions together. Each question follows the context by itself, and
        makes a prompt of at most ``max_tokens`` with it (None: the model's limit)."""
        return await decide(self.requests, context, questions, max_tokens)

    async def embed(self, texts: Sequence[str], options: EmbeddingOptions) -> Embeddings:
        """Returns the embeddings of texts, as one request of the tenant."""
        vectors, usage = await self.embedder.embed(texts, options, param="texts")
        return Embeddings([vector.tobytes() for vector in vectors], usage)

    def metered(self) -> AbstractAsyncContextManager[object]:
        """The scope of work that counts as a request of the tenant but generates nothing. Raises
        ``RateLimited``."""
        return self.requests.admitted()

    def check_gate(self, num_requests: int) -> None:
        """Raises ``RateLimited`` if the tenant may not send ``num_requests`` requests now."""
        if self.requests.gate is not None:
            self.requests.gate.check(self.tenant, num_requests)

    async def fork(self, context: EngineContext, count: int, *, ahead: bool = True) -> list[EngineContext]:
        """Returns contexts with the same ids, as one task group. ``ahead``: computes the part of their common
        prefix that is not cached yet, before the first of them needs it."""
        await self.requests.encode(context)
        self.requests.end_fill_ahead(context)
        if self._ahead is not None and ahead and count > 1:
            self._ahead.fork(context)
        group = self._new_number() if count > 1 else 0
        forked: list[EngineContext] = []
        turn = LoopTurn(64)
        try:
            for _ in range(count):
                forked.append(self._forked(context, group))
                await turn.pause()
        except BaseException:
            for one in forked:
                self.free(one)
            raise
        return forked

    def hint(self, context: EngineContext, hint: StateHint) -> None:
        """Attaches a hint to the state's next requests. If the hint announces forks, their prefix is computed
        now."""
        if self._ahead is None:
            hint = StateHint(trace=hint.trace)
        update = context.hint(hint)
        if update is not None:
            self._client.update_hint(update)
        if self._ahead is not None and hint.forks is not None and hint.forks > 1:
            self._ahead.announced(context)

    async def fill_ahead(self, context: EngineContext) -> None:
        """Computes the known tokens of a state that waits (``PrefixesAhead.fill``)."""
        if self._ahead is not None:
            await self._ahead.fill(context)

    async def fill_next_turn(self, context: EngineContext, end: Finished, answer: Message) -> None:
        """Computes the tokens of the next turn that are known now (``PrefixesAhead.fill_next_turn``)."""
        if self._ahead is not None:
            await self._ahead.fill_next_turn(context, end, answer)

    def text(self, context: EngineContext) -> str:
        """Returns all text, including the markup of the template."""
        return context.tokens.text_view()

    async def token_ids(self, context: EngineContext) -> list[int]:
        """Returns the current prompt's ids. Long text is encoded in a thread. The end stays open: text that
        is appended next is encoded together with it."""
        await self.requests.read_media(context)
        return await self.requests.run_off_loop(context.num_to_encode, context.tokens.ids)

    async def token_texts(self, context: EngineContext) -> list[str]:
        """Returns the texts of ``token_ids``, including markup."""
        token_ids = await self.token_ids(context)
        return await self.requests.run_off_loop(len(token_ids), context.tokens.token_texts, token_ids)

    def continue_session(self, context: EngineContext, session: str, *, is_last: bool) -> None:
        """Makes a new context the next one of a named session of the tenant, whose state has the tokens of
        the last one. ``is_last``: the state ends with this context."""
        if context.origin.state:
            number = number_of_name(f"{self.tenant.name}\0{session}")
            context.origin = msgspec.structs.replace(context.origin, state=number)
            context.outlived = not is_last

    def free(self, context: EngineContext) -> None:
        """Closes the state, unless it outlives the context. Its KV, which the cache prefers to keep, becomes
        ordinary cache, or is evicted first if the state was dropped."""
        context.is_freed = True
        self.requests.end_fill_ahead(context)
        if context.prefill_ahead is not None:
            self._client.forget(context.prefill_ahead.request_id)
        if context.has_run and context.origin.state and not context.outlived:
            self._client.close_state(context.origin.state, is_dropped=context.is_dropped)
        self._stats.rerendered_tokens += context.note_rerendered()

    def _new_number(self) -> int:
        return self._client.new_number() if self._ahead is not None else 0

    def _forked(self, context: EngineContext, group: int) -> EngineContext:
        origin = msgspec.structs.replace(
            context.origin,
            state=self._new_number(),
            task_group=group or context.origin.task_group,
        )
        return context.fork(origin)

    async def stats(self) -> Stats:
        """Returns the figures of the engine, for all sessions. A tenant that may not see them gets the tokens
        of its finished requests on this generator, and None for the rest."""
        return self._stats.visible(await self.engine_stats() if self.tenant.sees_metrics else None)

    def find_replica(self, context: EngineContext) -> int | None:
        """Returns the number of the replica on which the context's request runs, if there are several."""
        return self._client.find_replica(context.origin.state)

    @contextmanager
    def watching(self) -> Iterator[EngineView]:
        """The scope of a watch of the tenant's data. Raises ``Overloaded``."""
        hub = self._client.watches
        with hub.watching(self.tenant.name):
            yield EngineView(hub, self.tenant, self.tokenizer, self._stats.visible)

    async def engine_stats(self) -> EngineStats:
        """Returns the engine's stats, including figures that only the server's metrics show."""
        return await self._client.stats()

    def observe(self, observer: RequestObserver) -> None:
        """Registers an observer of the engine's requests, for all sessions."""
        self._client.observe(observer)


def _generated(
    end: Finished, params: SamplingParams, tokenizer: Tokenizer, text: str, reasoning: str
) -> Generated:
    """Returns the value of a finished generation.

    Args:
        end: the end of the request.
        params: its parameters.
        tokenizer: the model's tokenizer.
        text: of the value.
        reasoning: the reasoning before it, whose tokens do not belong to the value.
    """
    first = end.reasoning_tokens
    logprobs = tuple(end.logprobs[first:]) if params.wants_logprobs else None
    top_logprobs = _with_texts(tokenizer, end.top_logprobs[first:]) if params.top_logprobs else None
    tokens = None
    if logprobs is not None:
        tokens = tuple(tokenizer.token_text(token)[0] for token in end.token_ids[first:])
    return Generated(
        text,
        end.finish_reason,
        end.usage,
        logprobs,
        top_logprobs,
        reasoning=reasoning or None,
        tokens=tokens,
    )


def _reporting(text: AnswerText | ReplyText, on_text: OnText, on_reasoning: OnText | None) -> OnProgress:
    """Returns a callback for the progress of a generation, which reports new text and new reasoning."""

    def on_progress(progress: Progress) -> None:
        new = text.push(progress.text, progress.answer_at)
        if on_reasoning is not None and (reasoning := text.reasoning.new()):
            on_reasoning(reasoning)
        if new:
            on_text(new)

    return on_progress


def _with_texts(tokenizer: Tokenizer, places: Sequence[TopTokens | None]) -> TopLogprobs:
    return tuple(
        None
        if place is None
        else tuple(TokenLogprob(token, tokenizer.token_text(token)[0], p) for token, p in place)
        for place in places
    )
