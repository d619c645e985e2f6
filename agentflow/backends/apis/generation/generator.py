"""The ``Generator`` of the backends behind an API.

A context is a list of messages (``conversation``). Each call (``calls``) sends it whole, in the format of the
API, and streams the answer. Each answer is checked against its constraint. A constraint that the API cannot
enforce is refused, or with ``on_unsupported="retry"`` asked for again until an answer satisfies it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import anyio
import msgspec
from anyio.abc import TaskGroup

from agentflow.backends.apis.answers.answer import CHARS_PER_TOKEN, AnswerCollector
from agentflow.backends.apis.answers.selection import exact_scores, may_be_tokens, written_scores
from agentflow.backends.apis.answers.verification import OnUnsupported, found_fault
from agentflow.backends.apis.generation import decisions
from agentflow.backends.apis.generation.api_format import MAX_PLAIN_TOP_LOGPROBS, ApiRequest, Call
from agentflow.backends.apis.generation.calls import ApiCalls
from agentflow.backends.apis.generation.context_operations import ContextOperations
from agentflow.backends.apis.generation.conversation import ApiContext, count_chars, prefix_key
from agentflow.backends.apis.generation.embeddings import ApiEmbedder
from agentflow.backends.apis.generation.posted_calls import post_charged
from agentflow.backends.apis.generation.speculation import (
    Ahead,
    call_params,
    disagreement,
    is_useful,
    sampled_otherwise,
)
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    EngineFailed,
    NotSupported,
    ProtocolError,
    RequestRefused,
    RunFailed,
)
from agentflow.protocol.bounds.client_pattern import CannotCheck
from agentflow.protocol.chat import Message
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.decisions import Question, compute_probabilities, question_text
from agentflow.protocol.events import Capabilities, Stats, Usage
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.circuit import Circuit
from agentflow.runtime.generator import (
    METER,
    Decided,
    EmbeddingOptions,
    Embeddings,
    Generated,
    OnText,
    Scored,
    StateHint,
    Upcoming,
)
from agentflow.runtime.task_group import first_error, open_task_group

logger = logging.getLogger(__name__)

MAX_CHAT_TOP_LOGPROBS = 20
MAX_UNSCORED = 10_000
MIN_WARMED_TOKENS = 1024
"""The fewest new tokens of a prefix for which a request is sent ahead."""


class ApiGenerator(ContextOperations):
    """Generates with a model behind an API.

    Args:
        calls: Makes the calls.
        capabilities: The model's capabilities. With ``on_unsupported="retry"``, its constraints have the
            kinds that are checked, too.
        tasks: Runs the calls that go on after their generations (``speculation``).
        on_unsupported: ``retry``: other constraints, and schemas that the API cannot enforce, are checked.
        decisions_api: Whether the API has OpenAI's endpoint for decisions; None: it may have one.
        speculates: Whether calls go on for later gens of their turn; None: where the API cannot continue a
            turn.
        embedder: Makes the embeddings; None: there are none.
    """

    max_questions: float = decisions.MAX_AT_ONCE
    """The most questions of one decide that are asked at the same time."""

    def __init__(
        self,
        calls: ApiCalls,
        capabilities: Capabilities,
        tasks: TaskGroup,
        *,
        on_unsupported: OnUnsupported = "error",
        speculates: bool | None = None,
        decisions_api: bool | None = False,
        embedder: ApiEmbedder | None = None,
    ) -> None:
        self._calls = calls
        self._embedder = embedder
        if embedder is not None:
            capabilities = msgspec.structs.replace(capabilities, embedding_models=(embedder.model,))
        self.capabilities = capabilities
        self._on_unsupported = on_unsupported
        self._decisions_api = decisions_api
        self._tasks = tasks
        self._speculates = not capabilities.continuation if speculates is None else speculates
        self._num_failed_speculations = 0
        self._unscored: set[int] = set()  # hashes of choices that are no single tokens

    @property
    def endpoint(self) -> str:
        """The model and its server, for messages."""
        return self._calls.transport.endpoint

    @property
    def circuit(self) -> Circuit:
        """The circuit of the endpoint."""
        return self._calls.transport.circuit

    def circuit_open(self) -> AgentflowError:
        """The error of a call that is not made, because the circuit is open."""
        return self._calls.transport.circuit_open()

    def open(self, cache_salt: str, *, program: str = "", label: str = "") -> ApiContext:
        """An empty context."""
        return ApiContext(cache_salt, program, self, label=label)

    async def generate(
        self,
        context: ApiContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        """Generates the rest of the assistant's turn, or of a plain text. The arguments are as in
        ``Generator.generate``."""
        context.open_answer()
        upcoming, context.upcoming = context.upcoming, ()
        if context.is_ahead_inherited and params.temperature != 0:
            context.leave_ahead()  # each branch is a separate draw
        if context.ahead is None and self._may_speculate(context, params, constraint, upcoming):
            self._begin_ahead(context, params, upcoming)
        if context.ahead is not None:
            taken = await self._taken(context, params, on_text, constraint, on_reasoning, upcoming)
            if taken is not None:
                return taken
            context.leave_ahead()
        return await self._answered(context, params, on_text, constraint, on_reasoning, is_reply=False)

    async def reply(
        self,
        context: ApiContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None = None,
        on_reasoning: OnText | None = None,
    ) -> Generated:
        """Like ``generate``, but the model may call the context's tools."""
        context.leave_ahead()
        return await self._answered(context, params, on_text, constraint, on_reasoning, is_reply=True)

    async def score(self, context: ApiContext, choices: Sequence[str], method: str) -> Scored:
        """Scores the choices by log-probabilities if the API reports them for each. Otherwise the model
        writes one of them: its score is 0, and the score of the others ``UNKNOWN_SCORE``."""
        context.leave_ahead()
        context.open_answer()
        usage, scores = await self._exact_scores(context, tuple(choices), method)
        if scores is not None:
            index = scores.index(max(scores))
            context.answer(choices[index])
            return Scored(index, scores, usage)
        constraint = Constraint("choices", choices=tuple(choices))
        generated = await self._answered(
            context, self._greedy(), lambda text: None, constraint, None, is_reply=False
        )
        if generated.text not in choices:
            raise RunFailed(
                f"{self.capabilities.model} chose {generated.text!r:.200}, which is none of the choices "
                f"(it ended with {generated.finish_reason!r})"
            )
        scores = written_scores(generated.text, choices)
        return Scored(scores.index(0.0), scores, usage + generated.usage, "text")

    async def decide(self, context: ApiContext, questions: Sequence[Question]) -> Decided:
        """Asks the endpoint for decisions if there is one, and otherwise decides each question by itself: by
        the log-probabilities of letters, or by an answer that the model writes."""
        context.check_decidable()
        if self._decisions_api is not False and not context.has_images:
            try:
                decided = await self._decided_by_endpoint(context, questions)
                self._decisions_api = True  # later errors of it fail their requests
                return decided
            except (NotSupported, RequestRefused, ProtocolError, BadArgument):
                if self._decisions_api:
                    raise
                self._decisions_api = False  # the server has none, or another one
        found: list[Decided | None] = [None] * len(questions)
        limiter = anyio.CapacityLimiter(self.max_questions)

        async def decide_one(index: int) -> None:
            async with limiter:
                found[index] = await self._decided(context, questions[index])

        try:
            async with open_task_group() as tasks:
                for index in range(len(questions)):
                    tasks.start_soon(decide_one, index)
        except ExceptionGroup as group:  # several failed, perhaps for the same reason
            raise first_error(group) from group
        made = [one for one in found if one is not None]
        is_exact = all(one.decided_by == "logprobs" for one in made)
        return Decided(
            tuple([one.probabilities[0] for one in made]),
            sum([one.usage for one in made], Usage()),
            "logprobs" if is_exact else "text",
        )

    async def _decided_by_endpoint(self, context: ApiContext, questions: Sequence[Question]) -> Decided:
        messages = [node.message for node in context.messages()]
        if context.is_plain:
            messages = [Message("user", context.open_text)]
        key = prefix_key(context.program.encode(), context.cache_salt.encode())
        body = decisions.request_body(self.capabilities.model, messages, questions, key)
        calls, guess = self._calls, Usage(len(body) // CHARS_PER_TOKEN)
        probabilities, usage = await post_charged(
            calls.transport,
            calls.billing,
            decisions.PATH,
            body,
            lambda found: decisions.read_answers(found, questions, calls.transport.errors.server, guess),
            calls.count,
        )
        return Decided(probabilities, usage, "endpoint")

    async def _decided(self, context: ApiContext, question: Question) -> Decided:
        answers, usage = question.answers, Usage()
        if self.capabilities.logprobs and len(answers) <= MAX_CHAT_TOP_LOGPROBS:
            asked = context.asked(decisions.lettered_text(question))
            asked.open_answer()
            answer = await self._first_token(asked, MAX_CHAT_TOP_LOGPROBS)
            if answer is not None:
                usage = answer.usage
                probabilities = decisions.letter_probabilities(answer.tokens, len(answers))
                if probabilities is not None:
                    return Decided((probabilities,), usage)
        scored = await self.score(context.asked(question_text(question)), answers, "greedy_token_selection")
        usage += scored.usage
        if scored.decided_by == "logprobs":
            return Decided((compute_probabilities(scored.scores),), usage)
        written = tuple([float(index == scored.index) for index in range(len(answers))])
        return Decided((written,), usage, "text")

    async def _exact_scores(
        self, context: ApiContext, choices: tuple[str, ...], method: str
    ) -> tuple[Usage, tuple[float, ...] | None]:
        """The scores of choices that are single tokens, None if there are none, and the usage."""
        key = hash(choices)
        most = MAX_PLAIN_TOP_LOGPROBS if context.is_plain else MAX_CHAT_TOP_LOGPROBS
        if (
            not self.capabilities.logprobs
            or key in self._unscored
            or not may_be_tokens(choices, method, most)
        ):
            return Usage(), None
        answer = await self._first_token(context, most)
        if answer is None:
            self._remember_unscored(key)
            return Usage(), None
        scores = exact_scores(answer.tokens, choices)
        if scores is None:
            self._remember_unscored(key)
        return answer.usage, scores

    async def _first_token(self, context: ApiContext, most: int) -> AnswerCollector | None:
        """An answer of one token, with the ``most`` likeliest ones. None if the server reports none, or
        fewer."""
        least = self._calls.api.min_tokens
        call = Call(msgspec.structs.replace(self._greedy(), max_tokens=least, top_logprobs=most))
        try:
            request = self._calls.api.request(context, call)
            return await self._calls.answer(context, request, call, lambda text: None, None, is_held=True)
        except (NotSupported, RequestRefused):
            return None

    def _remember_unscored(self, key: int) -> None:
        if len(self._unscored) < MAX_UNSCORED:
            self._unscored.add(key)

    def hint(self, context: ApiContext, hint: StateHint) -> None:
        """Takes the trace, and whether the state's calls go on, and warms the prefix of several forks; APIs
        know no other hints."""
        if hint.trace:
            context.trace = hint.trace
        if hint.speculate is not None:
            context.speculates = hint.speculate
        if hint.forks is not None and hint.forks >= 2:
            self._warm(context)

    async def embed(self, texts: Sequence[str], options: EmbeddingOptions) -> Embeddings:
        """The embeddings of texts. ``NotSupported`` without an embedding model."""
        if self._embedder is None:
            raise NotSupported(f"{self.capabilities.model} makes no embeddings here: give embed_model=")
        return await self._embedder.embed(texts, options)

    async def stats(self) -> Stats:
        """The counters of this session; the counters of the server are not known."""
        total = self._calls.total + (Usage() if self._embedder is None else self._embedder.total)
        return Stats(
            self.capabilities.model,
            steps=None,
            prompt_tokens=total.prompt_tokens,
            cached_tokens=total.cached_tokens,
            cached_output_tokens=None,
            computed_tokens=None,
            generated_tokens=total.output_tokens,
            evicted_tokens=None,
            preemptions=None,
            free_slots=None,
            cached_slots=None,
            in_use_slots=None,
            total_slots=None,
            running=self._calls.num_running,
            waiting=None,
            peak_resident_bytes=None,
            restarts=None,
            forced_tokens=None,
            cost=total.cost,
            saved_calls=total.saved_calls,
            saved_tokens=total.saved_tokens,
            failed_speculations=self._num_failed_speculations,
            hedged_calls=self._calls.num_hedged,
        )

    def _greedy(self) -> GenParams:
        """The parameters of a select, before which the model does not reason if that can be avoided."""
        return GenParams(
            temperature=0.0 if self.capabilities.accepts("temperature") else None,
            max_reasoning_tokens=0 if self._calls.api.may_stop_reasoning else None,
        )

    # Warming

    def _warm(self, context: ApiContext) -> None:
        """Has the provider cache the prefix of forks that come next, before the first of them asks: they may
        wait for something else first. Nothing is sent for a prefix that an earlier gen has brought into the
        cache, or in the middle of a turn, which no fork has as its prefix."""
        is_between = context.role is None and not context.open_text and context.last is not None
        if not is_between or context.num_unsent_bytes < MIN_WARMED_TOKENS * CHARS_PER_TOKEN:
            return
        context.share()
        asked = context.forked()
        if context.last is not None and context.last.message.role not in ("user", "tool"):
            asked.begin_role("user")
            asked.fill(".")  # some APIs answer a user only
            asked.end_role()
        self._tasks.start_soon(self._run_warming, asked)

    async def _run_warming(self, asked: ApiContext) -> None:
        # Tools, and whether they may be called, are part of the prefix.
        call = Call(GenParams(max_tokens=self._calls.api.min_tokens), is_reply=bool(asked.tools))
        try:
            request = self._calls.api.request(asked, call)
            if request.gate is None or not request.gate.of(self._calls).is_needed:
                return
            answer = await self._calls.answer(asked, request, call, lambda text: None, None, is_held=True)
            # Its output is none of the program's: limits of output tokens would be used up by a hint.
            request.gate.usage += msgspec.structs.replace(answer.usage, output_tokens=0, reasoning_tokens=0)
        except AgentflowError as error:  # the forks do without it, and their gens say why
            logger.info("a prefix was not warmed: %s", error)
        except Exception:  # of one call, not of all that share the task group
            logger.exception("a prefix was not warmed because of a fault of the backend")

    # Speculation

    def _may_speculate(
        self,
        context: ApiContext,
        params: GenParams,
        constraint: Constraint | None,
        upcoming: Sequence[Upcoming],
    ) -> bool:
        is_wanted = self._speculates if context.speculates is None else context.speculates
        return (
            is_wanted
            and not context.is_plain
            and constraint is None  # the API could not go on after it
            and not params.wants_logprobs
            and is_useful(context.open_text, upcoming, params, continues=self.capabilities.continuation)
        )

    def _begin_ahead(self, context: ApiContext, params: GenParams, upcoming: Sequence[Upcoming]) -> None:
        """Begins a call that goes on. An API that cannot continue the turn begins it again: the model must
        write the fixed text itself."""
        continues, turn = self.capabilities.continuation, context.open_text
        asked = context.forked()
        if not continues:
            asked.parts = []
        asked.trace, context.trace = context.trace, ""
        call = Call(call_params("" if continues else turn, upcoming, params))
        request = self._calls.api.request(asked, call)
        ahead = context.ahead = Ahead(turn if continues else "", params, self)
        context.is_ahead_inherited = False
        self._tasks.start_soon(self._run_ahead, ahead, asked, request, call)

    async def _run_ahead(self, ahead: Ahead, asked: ApiContext, request: ApiRequest, call: Call) -> None:
        METER.set(None)  # each generation counts the text that it takes
        with ahead.scope:
            try:
                answer = await self._calls.answer(asked, request, call, ahead.extend, ahead.extend_reasoning)
                answer.deliver()
                ahead.finish(answer)
            except AgentflowError as error:
                ahead.fail(error)
            except Exception as error:  # of one call, not of all that share the task group
                logger.exception("a call failed because of a fault of the backend")
                ahead.fail(EngineFailed(f"the call failed: {error!r}"))
        if ahead.scope.cancelled_caught:
            ahead.leave(request.num_chars // CHARS_PER_TOKEN)

    async def _taken(
        self,
        context: ApiContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None,
        on_reasoning: OnText | None,
        upcoming: Sequence[Upcoming],
    ) -> Generated | None:
        """The next value, from the text of a call that went on; None if that does not have it."""
        ahead, turn = context.ahead, context.open_text
        assert ahead is not None
        is_first = ahead.num_served == 0
        if not ahead.is_sampled_as(params):
            if not self.capabilities.continuation:
                raise sampled_otherwise(self.capabilities.model)
            return None
        agrees = await ahead.agrees(turn)
        if ahead.error is not None and (is_first or not agrees):
            if is_first:
                raise ahead.error
            return None
        is_used_up = not is_first and await ahead.is_used_up(len(turn))
        if is_used_up and not self.capabilities.continuation:
            is_used_up = not ahead.has_ended  # the model wrote an empty value
        if not agrees or is_used_up:
            self._num_failed_speculations += 1
            if not self.capabilities.continuation and turn:
                raise ahead.error or disagreement(self.capabilities.model, turn, ahead.text)
            return None
        # A constrained value ends where the program goes on; it is checked before it is visible.
        fixed = next((item for item in upcoming[:1] if isinstance(item, str)), None)
        ends = (*params.stop, fixed) if constraint is not None and fixed else params.stop
        written = msgspec.structs.replace(params, stop=ends)
        answer = AnswerCollector(written, on_text, on_reasoning, is_held=constraint is not None)
        reason, num_tokens = await ahead.read(len(turn), params.max_tokens, answer)
        if reason == "length" and not is_first and (params.max_tokens or math.inf) > num_tokens:
            reason = ""  # the call ended here, not this generation
        if constraint is not None:
            answer.finish(reason)  # with the text that was held back; nothing is visible yet
        wrong = constraint is not None and (
            reason in ("", "length") or not await _is_kept(constraint, answer.text)
        )
        if wrong or (not reason and not answer.is_visible):
            answer.take_back()
            self._num_failed_speculations += 1
            if not self.capabilities.continuation:
                raise ahead.error or disagreement(self.capabilities.model, turn, ahead.text)
            return None
        if ahead.error is not None and not answer.is_stopped:
            raise ahead.error
        answer.finish(reason or "length")
        usage = ahead.charge(num_tokens)
        if not is_first:
            saved = self._estimated_prompt(context)
            usage += Usage(saved_calls=1, saved_tokens=saved)
            self._calls.total += Usage(saved_calls=1, saved_tokens=saved)
        answer.usage = usage
        generated = answer.deliver()
        context.answer(answer.text, (), answer.reasoning or None)
        return generated

    def _estimated_prompt(self, context: ApiContext) -> int:
        """The tokens of a prompt that was not sent."""
        nodes = context.messages()
        return sum([count_chars(node.message) for node in nodes]) // CHARS_PER_TOKEN

    async def _answered(
        self,
        context: ApiContext,
        params: GenParams,
        on_text: OnText,
        constraint: Constraint | None,
        on_reasoning: OnText | None,
        *,
        is_reply: bool,
    ) -> Generated:
        context.open_answer()
        call = Call(params, constraint, is_reply)
        try:
            request = await self._calls.request(context, call)
        except NotSupported:
            if constraint is None or self._on_unsupported != "retry":
                raise
            answer = await self._calls.verified(context, call, constraint, on_text, on_reasoning)
        else:
            answer = await self._calls.answer(context, request, call, on_text, on_reasoning)
            if constraint is not None:
                await self._calls.require_kept(context, request, call, constraint, answer)
        is_required = is_reply and bool(context.tools) and context.choice.mode == "required"
        if is_required and not answer.calls and answer.finish_reason != "length":
            raise RunFailed(
                f"{self.capabilities.model} called no tool, although the program requires a call: the chat "
                "template of its server may have no tools"
            )
        generated = answer.deliver()
        context.answer(answer.text, answer.calls, answer.reasoning or None, answer.native)
        return generated


async def _is_kept(constraint: Constraint, text: str) -> bool:
    """Whether a text is known to satisfy the constraint, which it was not generated under."""
    try:
        return await found_fault(constraint, text) is None
    except (CannotCheck, BadArgument):  # a pattern of a notation that is unknown here
        return False
