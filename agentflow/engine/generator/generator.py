"""The engine's interface to the interpreter: a ``Generator`` whose contexts are token ids.

Forks and turns are therefore exact to the token. The generator encodes text (long text in a worker thread),
compiles constraints, asks the tenant's gate, and sends requests through an ``EngineClient``. The HTTP
endpoints use it, too, with one generator per tenant.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

from agentflow.engine.client import EngineClient, OnProgress, RequestObserver
from agentflow.engine.generator.context import (
    CHARS_PER_TOKEN,
    CHARS_PER_TURN,
    EngineContext,
    FilledAhead,
    OutputTokenCache,
    PromptLimits,
    fill_conversation,
    fill_cost,
    num_chars,
    number_of_name,
)
from agentflow.engine.generator.decide import decided, encode_questions
from agentflow.engine.generator.embedding import (
    EmbeddingInput,
    check_options,
    encoded,
    prefix_of,
    run_embeddings,
    truncated,
)
from agentflow.engine.generator.media import Reader, placeholder_tokens, read_media
from agentflow.engine.generator.prompt_changes import PromptChanges
from agentflow.engine.generator.select import select_scores, with_ends
from agentflow.engine.grammar.compiler.compiler import ConstraintCompiler
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.messages import EngineStats, Finished, Progress
from agentflow.engine.request import check_request, check_task
from agentflow.engine.runner import RunnerInfo
from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.engine.submit import MAX_PRIORITY, Origin, TopTokens
from agentflow.engine.tenant import ANONYMOUS, AdmittedRequest, RequestGate, Tenant
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.reasoning import AnswerText, Thinking, reasoning_marks
from agentflow.engine.text.state.choices import WINDOW_CHARS, EncodedChoices
from agentflow.engine.text.state.rendered_prefixes import RenderedPrefixes
from agentflow.engine.text.state.token_state import TokenState
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.engine.text.tool_output import CallMarks
from agentflow.engine.text.tools import ReplyText
from agentflow.engine.watching.tenant_stats import TenantStats
from agentflow.engine.watching.view import EngineView
from agentflow.errors import AgentflowError, BadArgument, PromptTooLong, faults_of
from agentflow.protocol.chat import Conversation, Message, ToolChoice, ToolSpec, read_reply
from agentflow.protocol.constraint import CONSTRAINT_KINDS, Constraint
from agentflow.protocol.decisions import Question, question_text
from agentflow.protocol.events import Capabilities, Stats, TokenLogprob, TopLogprobs, Usage
from agentflow.protocol.images import Image, Video
from agentflow.protocol.sampling import GenParams, SamplingParams
from agentflow.runtime.generator import (
    Decided,
    EmbeddingOptions,
    Embeddings,
    Generated,
    OnText,
    Scored,
    StateHint,
)
from agentflow.runtime.turns import Turn

ResultT = TypeVar("ResultT")
ArgTs = TypeVarTuple("ArgTs")

# Longer text is encoded in a worker thread. Encoding this much takes about a millisecond.
MAX_INLINE_CHARS = 4000
# The worker threads of each tenant.
ENCODING_THREADS = 4
# Rendering a question costs about as much as encoding this many characters.
CHARS_PER_QUESTION = 500
# How often all turns before a question are rendered.
RENDERINGS = 4
# A shared prefix is computed before its forks ask for it if at least this many of its tokens are missing.
# For fewer, the forks wait for the first of them about as briefly.
MIN_AHEAD_TOKENS = 32


class EngineGenerator:
    """A ``Generator`` on a running engine. One engine serves many sessions and many of these generators.

    Args:
        client: the engine.
        template: the chat template.
        name: the model's public name, if it differs from the engine's.
        adapter: the name of the loaded adapter that requests use; empty: none.
        tenant: separates caches.
        gate: limits the requests of the tenant; None: no limits.
        use_hints: tell the engine the structure of the program: which requests continue one state, which are
            siblings, and which states will be forked.
        compiler: None if constraints are not supported.
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
        reader: Reader | None = None,
    ) -> None:
        self._embedding = embedding
        reader = reader if client.info.reads_media else None
        self._reader = reader
        self.patience_s = patience_s
        self._use_hints = use_hints
        self._client = client
        self._adapter = adapter
        self.template = template
        self._reasoning = reasoning_marks(template.source)
        self.tenant = tenant
        self.encoding_threads = anyio.CapacityLimiter(ENCODING_THREADS)  # of this tenant only
        self.limits = PromptLimits(client.tokenizer, client.info)
        self.output_token_cache = OutputTokenCache()
        self.rendered_prefixes = RenderedPrefixes(client.tokenizer)
        self._prompt_changes = PromptChanges()
        self._gate = gate
        self._compiler = compiler
        info = client.info
        self._generates = not info.embedding_size
        self.capabilities = Capabilities(
            model=name or info.model,
            roles=template.has_template,
            conversations=template.has_template,
            max_context=self.limits.max_tokens(),
            watch=True,
            constraints=() if compiler is None else CONSTRAINT_KINDS,
            embedding_models=(name or info.model,) if info.embedding_size else (),
            batch_size=info.batch_size,
            default_max_tokens=SamplingParams().max_tokens,
            images=reader is not None,
            videos=reader is not None and bool(reader.video_token),
        )
        self._stats = TenantStats(tenant, self.capabilities.model)

    @property
    def info(self) -> RunnerInfo:
        """The model and its memory."""
        return self._client.info

    @property
    def embedding_size(self) -> int:
        """The dimensions of the model's embeddings; 0: it generates text."""
        return self._client.info.embedding_size

    def check_task(self, *, embeds: bool) -> None:
        """Raises ``BadArgument`` if the model makes embeddings and is to generate text, or the reverse."""
        if embeds == self._generates:
            check_task(embeds, self._client.info)

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
            max_tokens: a far longer prompt is rejected before it is encoded; by default the longest that the
                model takes.
        """
        origin = Origin(
            self.tenant.name,
            cache_salt,
            state=self._new_number(),
            task_group=number_of_name(program) if program and self._use_hints else 0,
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
        if self._reader is not None:
            tokens.placeholder_tokens = placeholder_tokens(self._reader)
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
        """Appends an image, which is read before the text after it is encoded. Raises ``NotSupported`` if the
        model has no vision."""
        self.capabilities.require_images()
        context.medium(image)

    def video(self, context: EngineContext, video: Video) -> None:
        """Appends a video, which is read before the text after it is encoded. Raises ``NotSupported`` if the
        model reads no videos."""
        self.capabilities.require_videos(video.num_frames)
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
        await self.encode_beside(fill_cost(offered), context.offer_tools, self.template, offered)

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
        await self.encode_beside(fill_cost(conversation), fill)

    def keep(self, context: EngineContext, beginnings: Sequence[tuple[int, float]]) -> None:
        """Keeps beginnings of the context's conversation in the cache after its next request, as far as
        memory allows. ``beginnings``: numbers of messages, and the seconds."""
        if self._use_hints:
            context.kept_messages = beginnings

    async def keep_answer(self, context: EngineContext, end: Finished) -> None:
        """Keeps the tokens of the context and of the answer generated after it for conversations whose text
        begins with theirs."""
        amount = context.tokens.num_settled + len(end.token_ids)
        await self.encode_beside(amount, context.tokens.keep_answer, end.token_ids, end.text)

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
        thinking = await self._thinking(context, sampling, constraint, replies=True)
        text = ReplyText(context.tools, constraint, thinking)
        on_progress = _reporting(text, on_text, on_reasoning)
        calls = None if context.tools is None else context.tools.marks
        end = await self.complete(
            context, sampling, on_progress, text.constraint, thinking=thinking, calls=calls
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
        those of ``reply``."""
        sampling = params.resolved()
        thinking = await self._thinking(context, sampling, constraint, replies=False)
        text = None if thinking is None else AnswerText(thinking)
        on_progress = _passing(on_text) if text is None else _reporting(text, on_text, on_reasoning)
        end = await self.complete(context, sampling, on_progress, constraint, thinking=thinking)
        context.tokens.generated(end.token_ids, end.text)
        answer, reasoning = end.text, ""
        if text is not None:
            answer, reasoning = text.finish(end.text, end.answer_at), str(text.reasoning)
        generated = _generated(end, sampling, self.tokenizer, answer, reasoning)
        start = len(end.text) - len(answer)
        forced = tuple([(first - start, length) for first, length in end.forced if first >= start])
        return msgspec.structs.replace(generated, forced=forced) if forced else generated

    async def _thinking(
        self, context: EngineContext, params: SamplingParams, constraint: Constraint | None, *, replies: bool
    ) -> Thinking | None:
        """Returns how the output for a program may begin with reasoning. By default a model does not reason
        before a constraint, so that reasoning does not use up the tokens of a short form."""
        if self._reasoning is None:
            return None
        await self._encode(context)
        default = None if constraint is None else 0
        budget = default if params.max_reasoning_tokens is None else params.max_reasoning_tokens
        return context.thinking(budget, replies=replies)

    async def complete(
        self,
        context: EngineContext,
        params: SamplingParams,
        on_progress: OnProgress,
        constraint: Constraint | None = None,
        on_sent: Callable[[], None] | None = None,
        thinking: Thinking | None = None,
        on_compiled: Callable[[CompiledConstraint], None] | None = None,
        calls: CallMarks | None = None,
    ) -> Finished:
        """Generates after the context, which does not change.

        Args:
            context: the state.
            params: the sampling parameters.
            on_progress: called with the progress of each step.
            constraint: of the text, or None.
            on_sent: called when the request is in the engine's queue, after all checks that are possible
                before it runs.
            thinking: how the output may begin with reasoning, with a budget.
            on_compiled: called with the compiled constraint.
            calls: the marks of tool calls, inside which no stop applies.
        """
        self.check_task(embeds=False)
        if constraint is not None:
            self.capabilities.require(constraint)
        if thinking is not None:
            thinking = msgspec.structs.replace(
                thinking, strips=constraint is None or constraint.has_free_text
            )
        await self._until_ready()
        with self._admit(context) as admitted:
            admitted.prompt_tokens = 0  # until the engine has the request
            if context.num_unencoded_chars:
                self.limits.check_length(context.num_unencoded_chars)
            token_ids = await self.prompt_ids(context)
            if context.outline is not None:
                context.changed = self._prompt_changes.reason(context.outline, context.tokens.text_keys)
                context.outline = None
            compiled = None
            if constraint is not None and self._compiler is not None:
                with faults_of("constraint"):
                    compiled = await self._compiler.compile(constraint, tenant=self.tenant.name)
                    compiled = compiled.limited(constraint)
                if on_compiled is not None:
                    on_compiled(compiled)
            self._begins(context)

            def hear(progress: Progress) -> None:
                admitted.output_tokens += len(progress.token_ids) - progress.num_dropped
                on_progress(progress)

            self._client.check_room(self.tenant.name)
            if params.logit_bias or len(token_ids) >= self.limits.most_tokens:
                check_request(len(token_ids), params, self._client.info)
            admitted.prompt_tokens = len(token_ids)
            end = await self._client.generate(
                token_ids,
                params,
                seed=params.seed or 0,
                origin=context.origin_now(),
                on_progress=hear,
                constraint=compiled,
                jump_forward=constraint is None or constraint.jump_forward,
                on_sent=on_sent,
                thinking=thinking,
                calls=calls,
            )
            admitted.cached_tokens, admitted.output_tokens = end.cached_tokens, end.output_tokens
        self._count(_usage(end))
        context.num_computed = len(token_ids) + len(end.token_ids)
        return end

    def _count(self, usage: Usage) -> None:
        """Counts a request in the tenant's own figures, for a tenant that does not see the engine's."""
        if not self.tenant.sees_metrics:
            self._stats.count(usage)

    async def score_prompt(self, context: EngineContext, num_top: int) -> Finished:
        """Returns the log-probability of each token of the context except the first, given all tokens before
        it, with the ``num_top`` likeliest tokens at its place. All tokens are computed, and then cached."""
        self.check_task(embeds=False)
        await self._until_ready()
        with self._admit(context) as admitted:
            admitted.prompt_tokens = 0
            token_ids = await self.prompt_ids(context)
            self._client.check_room(self.tenant.name)
            admitted.prompt_tokens = len(token_ids)
            self._begins(context)
            end = await self._client.score(token_ids, 1, num_top=num_top, origin=context.origin_now())
        self._count(_usage(end))
        context.num_computed = len(token_ids) - 1
        return end

    @asynccontextmanager
    async def metered(self) -> AsyncIterator[None]:
        """The scope of work that counts as a request of the tenant but generates nothing. Raises
        ``RateLimited``."""
        await self._until_ready()
        with self._admit():
            yield

    async def _until_ready(self) -> None:
        """Prepares the gate for ``_admit``, which must follow immediately."""
        if self._gate is not None and (leasing := self._gate.ready(self.tenant)) is not None:
            await leasing

    @contextmanager
    def _admit(self, context: EngineContext | None = None, num_chars: int = 0) -> Iterator[AdmittedRequest]:
        """The scope of a request over the context and ``num_chars`` more characters."""
        if self._gate is None:
            yield AdmittedRequest(0)
            return
        num_tokens = num_chars // CHARS_PER_TOKEN
        if context is not None:
            num_tokens += context.num_guessed_tokens
        with self._gate.request(self.tenant, num_tokens) as admitted:
            yield admitted

    async def score(self, context: EngineContext, choices: Sequence[str], method: str) -> Scored:
        """Scores all choices, by the tokens after their common beginning. The chosen one is appended with the
        scored ids."""
        self.check_task(embeds=False)
        await self._until_ready()
        with self._admit(context) as admitted:
            admitted.prompt_tokens = 0  # until the engine has the request
            encoded = await self._encode_choices(context, choices)
            self._client.check_room(self.tenant.name)
            scored = encoded
            if method == "likelihood":
                amount = len(choices) + RENDERINGS * CHARS_PER_TURN * context.num_turns
                end_ids = self._client.info.end_token_ids
                scored = await self.encode_beside(amount, with_ends, context.tokens, encoded, end_ids)
                self._client.check_room(self.tenant.name)
            admitted.prompt_tokens = len(scored.prefix) + sum(map(len, scored.ends))
            self._begins(context)
            scores, end = await select_scores(self._client, context, scored, method)
            admitted.cached_tokens = end.cached_tokens
            self._count(_usage(end))
        best = max(range(len(scores)), key=scores.__getitem__)
        context.tokens.choose(encoded, best)
        context.mark_encoded()
        context.num_computed = len(encoded.prefix)
        return Scored(best, tuple(scores), _usage(end))

    async def decide(
        self, context: EngineContext, questions: Sequence[Question], *, max_tokens: int | None = None
    ) -> Decided:
        """Scores the answers to all questions together. Each question follows the context by itself, and
        makes a prompt of at most ``max_tokens`` with it (None: what the model takes)."""
        self.check_task(embeds=False)
        lengths = [len(question_text(question)) for question in questions]
        num_chars = sum(lengths)
        await self._until_ready()
        with self._admit(context, num_chars) as admitted:
            admitted.prompt_tokens = 0  # until the engine has the request
            await self._encode(context)
            self.limits.check_length(max(lengths))  # each is a separate prompt
            per_question = CHARS_PER_QUESTION + RENDERINGS * CHARS_PER_TURN * context.num_turns
            amount = num_chars + per_question * len(questions)
            asked = await self.encode_beside(
                amount, encode_questions, context.tokens, questions, self._client.info.end_token_ids
            )
            if max_tokens is not None:
                most = self.limits.max_tokens(max_tokens)
                self.limits.check_num_tokens(len(asked.prompt) + max(map(len, asked.heads)), most)
            self._client.check_room(self.tenant.name)
            admitted.prompt_tokens = asked.num_tokens
            self._begins(context)
            probabilities, end = await decided(self._client, asked, context.origin_now())
            admitted.cached_tokens = end.cached_tokens
            usage = Usage(asked.num_tokens, end.cached_tokens)
            self._count(usage)
        num_own = min(len(asked.prompt), context.tokens.num_settled)  # the rest belongs to the questions
        context.num_computed = max(context.num_computed, num_own)
        return Decided(tuple(probabilities), usage)

    async def embed(self, texts: Sequence[str], options: EmbeddingOptions) -> Embeddings:
        """Returns the embeddings of texts, as one request of the tenant."""
        vectors, usage = await self.embed_inputs(texts, options, param="texts")
        return Embeddings([vector.tobytes() for vector in vectors], usage)

    async def embed_inputs(
        self,
        inputs: Sequence[EmbeddingInput],
        options: EmbeddingOptions,
        *,
        param: str = "input",
        priority: int = 0,
        patience_s: float | None = None,
        trace: str = "",
        max_tokens: int | None = None,
    ) -> tuple[list[NDArray[np.float32]], Usage]:
        """Returns the embeddings of texts and of token ids.

        Args:
            inputs: texts or token ids.
            options: the prompt and the dimensions.
            param: the caller's name of the inputs, for errors.
            priority: as for ``open``.
            patience_s: as for ``open``.
            trace: as for ``open``.
            max_tokens: the limit of all inputs together.

        Raises:
            BadArgument: an input or an option is invalid.
            PromptTooLong: an input, or all together, are too long.
        """
        client = self._client
        check_options(options, client)
        prefix = prefix_of(options, self._embedding)
        amount = sum(map(len, inputs)) + len(prefix) * len(inputs)
        await self._until_ready()
        with self._admit(num_chars=amount) as admitted:
            admitted.prompt_tokens = 0
            ids = await self.encode_beside(amount, encoded, client, inputs, prefix, self._embedding, param)
            num_tokens = sum(map(len, ids))
            if max_tokens is not None and num_tokens > max_tokens:
                raise PromptTooLong(
                    f"{param}: the inputs have {num_tokens:,} tokens together; this server takes at most "
                    f"{max_tokens:,} in one request: send fewer",
                    param=param,
                )
            client.check_room(self.tenant.name)
            admitted.prompt_tokens = num_tokens
            origin = Origin(
                self.tenant.name,
                weight=self.tenant.weight,
                objective="throughput" if len(ids) > 1 else "latency",
                priority=priority,
                patience_s=patience_s,
                trace=trace,
                label="embed",
            )
            vectors, usage = await run_embeddings(client, ids, origin)
            admitted.cached_tokens = usage.cached_tokens
        self._count(usage)
        return [truncated(vector, options.dimensions) for vector in vectors], usage

    async def _encode_choices(self, context: EngineContext, choices: Sequence[str]) -> EncodedChoices:
        """Encodes in a worker thread if the text is long."""
        num_chars = context.num_to_encode + sum(map(len, choices)) + WINDOW_CHARS * len(choices)
        await self._read_media(context)
        encoded = await self.encode_beside(num_chars, context.tokens.encode_choices, choices)
        if not encoded.num_before and not encoded.text:
            raise BadArgument("select on an empty state: append some text or a turn first")
        return encoded

    async def check_texts(self, texts: Iterable[str], most: int | None = None) -> None:
        """Runs ``limits.checking_texts`` for ``most`` tokens (None: the model's limit) in a worker thread. It
        ends soon after the caller is cancelled. Raises ``PromptTooLong``."""
        steps = self.limits.checking_texts(list(texts), most)
        num_chars = next(steps, 0)
        while num_chars:
            num_chars = await self.encode_beside(num_chars, next, steps, 0)

    def check_gate(self, num_requests: int) -> None:
        """Raises ``RateLimited`` if the tenant may not send ``num_requests`` requests now."""
        if self._gate is not None:
            self._gate.check(self.tenant, num_requests)

    async def fork(self, context: EngineContext, count: int, *, ahead: bool = True) -> list[EngineContext]:
        """Returns contexts with the same ids, as one task group. ``ahead``: computes the part of their common
        prefix that is not cached yet, before the first of them needs it."""
        await self._encode(context)
        self._end_fill_ahead(context)
        if self._use_hints and ahead and count > 1:
            self._compute_ahead(context)
        group = self._new_number() if count > 1 else 0
        forked: list[EngineContext] = []
        turn = Turn(64)
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
        if hint.trace:
            context.origin = msgspec.structs.replace(context.origin, trace=hint.trace)
        if not self._use_hints:
            return
        context.is_dropped = context.is_dropped or hint.is_dropped
        if hint.objective is not None or hint.output_tokens:
            origin = context.origin
            context.origin = msgspec.structs.replace(
                origin,
                objective=hint.objective or origin.objective,
                output_tokens=hint.output_tokens or origin.output_tokens,
            )
        place = hint.place
        if hint.objective is not None and (place := place or context.place) is not None:
            place = msgspec.structs.replace(place, objective=hint.objective)
        if place is not None and place != context.place:
            if hint.begins or not context.has_run or not context.origin.state:
                context.place = place  # the next request tells the engine
            else:
                self._client.place(context.placed(place))
        if hint.deadline_s is not None:
            context.deadline = time.monotonic() + hint.deadline_s
        if hint.forks is not None and hint.forks > 1:
            is_short = context.num_to_encode <= MAX_INLINE_CHARS and not context.tokens.unread
            if is_short:
                context.tokens.cut()
                self._compute_ahead(context)

    async def fill_ahead(self, context: EngineContext) -> None:
        """Computes the tokens that are known, at the lowest priority of the tenant, if enough are missing.
        Ends when the state's next request begins, which would wait for the rest at its own priority. Only for
        tenants without rate limits, as in ``_compute_ahead``."""
        if not self._use_hints or not self._is_unlimited:
            return
        before = context.filled_ahead.num_tokens if context.filled_ahead is not None else 0
        try:
            self.limits.check_length(context.num_unencoded_chars)
            await self._read_media(context)
            token_ids = await self.encode_beside(context.num_to_encode, context.tokens.ids_ahead)
        except AgentflowError:  # the state's next request explains it
            return
        if context.is_freed:  # while a thread encoded its text
            return
        known = max(before, min(context.num_computed, context.tokens.num_kept(token_ids)))
        if len(token_ids) - known < MIN_AHEAD_TOKENS:
            return
        self._end_fill_ahead(context)
        request_id = self._client.compute_ahead(token_ids, origin=self._origin_ahead(context))
        context.filled_ahead, context.has_run = FilledAhead(request_id, len(token_ids)), True

    def _origin_ahead(self, context: EngineContext) -> Origin:
        """The origin of a request that computes known tokens of a waiting state."""
        return msgspec.structs.replace(
            context.origin_ahead(),
            objective="throughput",
            priority=-MAX_PRIORITY,
            deadline_s=None,
            patience_s=None,
            trace="",
            is_ahead=True,
        )

    async def fill_next_turn(self, context: EngineContext, end: Finished, answer: Message) -> None:
        """Computes what the next prompt of a conversation begins with, after its answer, as ``fill_ahead``
        does for programs: many templates write past answers in another way, without their reasoning. The
        context does not change, and the engine goes on after it is freed."""
        if not self._use_hints or not self._is_unlimited or not end.token_ids:
            return
        tokens = context.tokens.copied()

        def next_ids() -> list[int]:
            tokens.generated(end.token_ids, end.text)
            if answer.tool_calls:
                tokens.called(answer)
            tokens.end_role()
            tokens.cut()
            return tokens.ids_ahead()

        try:
            token_ids = await self.encode_beside(tokens.num_settled + len(end.token_ids), next_ids)
        except AgentflowError:  # the next request explains it
            return
        if len(token_ids) - min(context.num_computed, tokens.num_kept(token_ids)) >= MIN_AHEAD_TOKENS:
            origin = self._origin_ahead(context)
            state = origin.state if context.outlived else 0
            self._client.compute_ahead(token_ids, origin=msgspec.structs.replace(origin, state=state))

    def _begins(self, context: EngineContext) -> None:
        """The state's next request begins."""
        context.has_run = True
        self._end_fill_ahead(context)

    def _end_fill_ahead(self, context: EngineContext) -> None:
        """Keeps the tokens that are computed. Otherwise requests would wait for one of a low priority."""
        if context.filled_ahead is not None:
            self._client.forget(context.filled_ahead.request_id)
            context.filled_ahead = None

    @property
    def _is_unlimited(self) -> bool:
        return self._gate is None or self._gate.is_unlimited(self.tenant)

    def text(self, context: EngineContext) -> str:
        """Returns all text, including the markup of the template."""
        return context.tokens.text_view()

    async def token_ids(self, context: EngineContext) -> list[int]:
        """Returns the current prompt's ids. Long text is encoded in a thread. The end stays open: text that
        is appended next is encoded together with it."""
        await self._read_media(context)
        return await self.encode_beside(context.num_to_encode, context.tokens.ids)

    async def token_texts(self, context: EngineContext) -> list[str]:
        """Returns the texts of ``token_ids``, including markup."""
        token_ids = await self.token_ids(context)
        return await self.encode_beside(len(token_ids), context.tokens.token_texts, token_ids)

    def _compute_ahead(self, context: EngineContext) -> None:
        """Computes the prefix before forks need it, if enough of its tokens are missing. Only for tenants
        without rate limits: tokens computed ahead are not charged."""
        token_ids = context.tokens.ids()
        if len(token_ids) - context.num_computed < MIN_AHEAD_TOKENS:
            return
        if not self._is_unlimited:
            return
        if context.prefill_ahead is not None:
            self._client.forget(context.prefill_ahead)
        context.prefill_ahead = self._client.compute_ahead(
            token_ids, origin=msgspec.structs.replace(context.origin_ahead(), trace="")
        )
        context.num_computed, context.has_run = len(token_ids), True

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
        self._end_fill_ahead(context)
        if context.prefill_ahead is not None:
            self._client.forget(context.prefill_ahead)
        if context.has_run and context.origin.state and not context.outlived:
            self._client.close_state(context.origin.state, is_dropped=context.is_dropped)
        self._stats.rerendered_tokens += context.tokens.num_rerendered_tokens

    def _new_number(self) -> int:
        return self._client.new_number() if self._use_hints else 0

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
        return self._stats.shown(await self.engine_stats() if self.tenant.sees_metrics else None)

    def replica_of(self, context: EngineContext) -> int | None:
        """Returns the number of the replica on which the context's request runs, if there are several."""
        return self._client.replica_of(context.origin.state)

    @contextmanager
    def watching(self) -> Iterator[EngineView]:
        """The scope of a watch of the tenant's data. Raises ``Overloaded``."""
        hub = self._client.watches
        with hub.watching(self.tenant.name):
            yield EngineView(hub, self.tenant, self.tokenizer, self._stats.shown)

    async def engine_stats(self) -> EngineStats:
        """Returns the engine's stats, including figures that only the server's metrics show."""
        return await self._client.stats()

    def observe(self, observer: RequestObserver) -> None:
        """Registers an observer of the engine's requests, for all sessions."""
        self._client.observe(observer)

    async def prompt_ids(self, context: EngineContext) -> list[int]:
        """Returns the current prompt's ids. Raises ``BadArgument`` if there are none."""
        await self._read_media(context)
        token_ids = await self.encode_beside(context.num_to_encode, context.encoded_ids)
        context.mark_encoded()
        if not token_ids:
            raise BadArgument("gen on an empty state: append some text or a turn first")
        return token_ids

    async def _encode(self, context: EngineContext) -> None:
        """Encodes appended text, in a thread if it is long. The state's ops run one after the other, so
        nothing else changes the tokens meanwhile."""
        await self._read_media(context)
        await self.encode_beside(context.num_to_encode, context.encode)
        context.mark_encoded()

    async def _read_media(self, context: EngineContext) -> None:
        """Reads the images and videos that were appended. Raises the errors of ``read_media``."""
        media = list(context.tokens.unread.values())
        if media:
            for medium in media:
                if isinstance(medium, Video):
                    self.capabilities.require_videos(medium.num_frames)
                else:
                    self.capabilities.require_images()
            assert self._reader is not None
            await read_media(context.tokens, self._reader, self._client, self.tenant.name, media, self.limits)

    async def encode_beside(
        self, amount: int, encode: Callable[[Unpack[ArgTs]], ResultT], *arguments: *ArgTs
    ) -> ResultT:
        """Calls a function that processes ``amount`` characters or tokens. Large amounts use a thread of the
        tenant, so that the event loop continues and the threads of others stay free."""
        if amount > MAX_INLINE_CHARS:
            return await anyio.to_thread.run_sync(encode, *arguments, limiter=self.encoding_threads)
        return encode(*arguments)


def _generated(
    end: Finished, params: SamplingParams, tokenizer: Tokenizer, text: str, reasoning: str
) -> Generated:
    """Returns the value of a finished generation.

    Args:
        end: the end of the request.
        params: its parameters.
        tokenizer: of the model.
        text: of the value.
        reasoning: the reasoning before it, whose tokens do not belong to the value.
    """
    first = end.reasoning_tokens
    logprobs = tuple(end.logprobs[first:]) if params.wants_logprobs else None
    top_logprobs = _with_texts(tokenizer, end.top_logprobs[first:]) if params.top_logprobs else None
    tokens = tuple(tokenizer.shown(token)[0] for token in end.token_ids[first:]) if logprobs else None
    return Generated(
        text,
        end.finish_reason,
        _usage(end),
        logprobs,
        top_logprobs,
        reasoning=reasoning or None,
        tokens=tokens,
    )


def _passing(on_text: OnText) -> OnProgress:
    """Returns a callback for the progress of a generation without reasoning, which reports new text."""

    def on_progress(progress: Progress) -> None:
        if progress.text:
            on_text(progress.text)

    return on_progress


def _reporting(text: AnswerText | ReplyText, on_text: OnText, on_reasoning: OnText | None) -> OnProgress:
    """Returns a callback for the progress of a generation, which reports new text and new reasoning."""

    def on_progress(progress: Progress) -> None:
        new = text.push(progress.text, progress.answer_at)
        if on_reasoning is not None and (reasoning := text.reasoning.new()):
            on_reasoning(reasoning)
        if new:
            on_text(new)

    return on_progress


def _usage(end: Finished) -> Usage:
    """Returns the token counts of the generation."""
    return Usage(
        end.prompt_tokens,
        end.cached_tokens,
        end.output_tokens,
        end.forced_tokens,
        end.reasoning_tokens,
        miss_reason=end.miss_reason,
    )


def _with_texts(tokenizer: Tokenizer, places: Sequence[TopTokens | None]) -> TopLogprobs:
    return tuple(
        None
        if place is None
        else tuple(TokenLogprob(token, tokenizer.shown(token)[0], p) for token, p in place)
        for place in places
    )
