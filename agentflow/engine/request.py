"""A request: the client's message, the engine's record with its tokens, progress and memory, and its row in a
batch.

A client sends a ``Submit`` with its ``Origin``. ``make_request`` checks it and makes the engine's
``Request``; ``check_request`` finds an error before a client submits. ``make_rows`` makes the ``Row`` of each
request in a batch when the batch is scheduled, and its results are read from the row when the batch
completes. In ``req_to_token``, the scheduler's table of slots (``Batch``), a running request has a row, too.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from agentflow.engine.batch import BatchOutput
from agentflow.engine.cache.nodes import PrefixMatch, SlotArray
from agentflow.engine.cache.token_run import TokenArray, TokenRun
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.grammar import TokenWords
from agentflow.engine.media_run import (
    NO_MEDIA,
    MediaRun,
    PromptMedia,
    SubmittedRun,
    pseudo_tokens,
    with_leads,
)
from agentflow.engine.runner import RunnerInfo
from agentflow.engine.text.reasoning import ReasoningFormat
from agentflow.engine.text.tool_output import CallMarks
from agentflow.engine.token_tree import TokenTree, token_tree
from agentflow.errors import BadArgument, EngineFailed, PromptTooLong
from agentflow.protocol.sampling import SamplingParams

Objective = Literal["latency", "throughput"]
"""``latency`` if a consumer waits for the request, ``throughput`` if only the total throughput counts."""

TopTokens = list[tuple[int, float]]
"""The likeliest tokens at one position with their log-probabilities, likeliest first."""


GREEDY = SamplingParams()
"""The parameters of requests that are submitted without ``params``."""
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
"""Range of a tenant's weight."""
MAX_PRIORITY = 10
"""Priorities of requests are -MAX_PRIORITY to MAX_PRIORITY."""


AWAITED_GROUPS = 2**61
"""Task groups with numbers from this one to ``PATIENT_GROUPS`` have a consumer with the objective
``latency``."""
PATIENT_GROUPS = 2**62
"""Task groups with numbers from this one on have a consumer with the objective ``throughput``."""


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The source of a request, and the program's hints about it. Requests share cached KV only if their
    ``tenant``, ``cache_salt`` and adapter are equal."""

    tenant: str = ""
    cache_salt: str = ""
    objective: Objective = "latency"
    state: int = 0  # the program state that the request continues; 0: none
    task_group: int = 0  # equal for sibling requests that one consumer waits for; 0: none
    output_tokens: int = 0  # the expected length of the output; 0: unknown
    deadline_s: float | None = None  # the time from now until the request should be done
    weight: float = 1.0  # the tenant's weight against other tenants; its latest request sets it
    priority: int = 0  # -10 to 10, higher first, within the tenant
    # A request that has waited this long is scheduled before others of its tenant and priority; None: never.
    patience_s: float | None = None
    trace: str = ""  # the client's ``traceparent``, for observers; the engine does not use it
    label: str = ""  # the program's name, which snapshots show
    adapter: str = ""  # the name of a loaded adapter (LoRA); empty: the base model
    program: int = 0  # the program whose position in the queue the request shares; 0: none
    # Why its prompt differs from earlier prompts of the same conversation, as in ``Usage.miss_reason``.
    changed: str = ""
    # It prefills known tokens of a waiting state ahead of its next request. Other requests do not wait for
    # it.
    is_ahead: bool = False
    tpot_s: float | None = None  # the time per output token that its reader asks for; None: any
    ttft_s: float | None = None  # the time to the first token, from now, that its reader asks for; None: any
    # Prefixes that the client asks to keep in the cache: how many tokens, and for how many seconds after
    # their last use.
    kept_prefixes: Sequence[tuple[int, float]] = ()
    # No client sent its prompt: it computes ahead, or a part of the work of another request. Its tokens count
    # as computed, and not as tokens of prompts.
    is_extra: bool = False

    def at(
        self,
        program: int,
        task_group: int,
        objective: Objective,
        tpot_s: float | None = None,
        ttft_s: float | None = None,
    ) -> Origin:
        """Returns this origin with another scheduling hint. The arguments are fields of ``Origin``."""
        return msgspec.structs.replace(
            self, program=program, task_group=task_group, objective=objective, tpot_s=tpot_s, ttft_s=ttft_s
        )

    @property
    def gates_latency(self) -> bool:
        """Whether a request with the objective ``latency`` waits for the whole task group."""
        return AWAITED_GROUPS <= self.task_group < PATIENT_GROUPS

    def check(self) -> None:
        """Raises ``BadArgument`` for a priority or a weight that is out of range."""
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise BadArgument(
                f"priority must be {-MAX_PRIORITY} to {MAX_PRIORITY}, not {self.priority}", param="priority"
            )
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise BadArgument(
                f"a tenant's weight must be {MIN_WEIGHT} to {MAX_WEIGHT}, not {self.weight}", param="weight"
            )


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Runs a request over ``token_ids``. Generates up to ``params.max_tokens``. Without ``params``, computes
    the tokens only, scores the tokens from ``score_from`` on, scores each of ``choices`` as a continuation of
    the prompt (with ``heads``: of the prompt and its head), or makes an embedding.

    If a request continues after its engine died, its ``generated_*`` fields hold the output that the engine
    had sent as ``Progress``. Text that was sent is not sent again, even if these ids end before it."""

    request_id: int
    token_ids: list[int]
    params: SamplingParams | None
    seed: int = 0
    origin: Origin = Origin()
    score_from: int = 0  # the index of the first scored token
    choices: Sequence[Sequence[int]] = ()  # the token ids of each choice
    generated_ids: Sequence[int] = ()
    generated_logprobs: Sequence[float] = ()
    generated_top_logprobs: Sequence[TopTokens] = ()
    generated_forced: Sequence[tuple[int, int]] = ()
    constraint: CompiledConstraint | None = None  # without its payload if the engine already has it
    jump_forward: bool = True  # append the tokens that the grammar forces without sampling them
    embeds: bool = False  # make an embedding
    # The output may begin with reasoning, to which neither the constraint nor a stop applies.
    reasoning_format: ReasoningFormat | None = None
    calls: CallMarks | None = None  # the output may have tool calls, to which no stop applies
    generated_text: str = ""
    num_redrawn: int = 0  # how often the dead engine had replaced sampled tokens
    # The identity of the adapter that had the name ``origin.adapter`` when the request was sent. The request
    # keeps this adapter until it ends.
    adapter: str = ""
    # Texts between the prompt and the choices, such as several questions about one prompt (``token_tree``).
    heads: Sequence[Sequence[int]] = ()
    head_of: Sequence[int] = ()  # the head of each choice, by its index
    media: Sequence[SubmittedRun] = ()  # the images in the prompt, in order; the engine has their content


_NO_SLOTS: SlotArray = np.empty(0, dtype=np.int32)


class CacheKey(NamedTuple):
    """Requests share cached KV only if their keys are equal. ``adapter``: the identity of the adapter (LoRA);
    empty for the base model."""

    tenant: str
    salt: Hashable
    adapter: str = ""


class Status(enum.Enum):
    """``RUNNING`` requests have a row of ``req_to_token`` and are part of batches."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A generation (``max_new_tokens`` > 0), a prefill without output (0), a scoring, a select, or an
    embedding.

    ``tokens`` is a buffer of which the first ``num_tokens`` are known: the prompt, then the output. Batches
    in flight will append ``num_pending`` more. The first ``num_computed`` of all these have KV in the pool,
    or will have it when the batches in flight have run.
    """

    # As it was submitted:
    id: int
    tokens: TokenArray  # the prompt, then the output; a buffer
    num_tokens: int  # known tokens
    num_prompt: int  # tokens of the prompt
    max_new_tokens: int  # the limit of the output
    params: SamplingParams
    origin: Origin  # the program's hints
    cache_key: CacheKey
    seed: int = 0
    score_from: int = 0  # > 0: it is a scoring of the tokens from this index on, and generates nothing
    tree: TokenTree | None = None  # of a select: its choices, below its tokens
    embeds: bool = False  # it wants the hidden state of its last token
    end_ids: tuple[int, ...] = ()  # tokens that end it; forbidden before ``params.min_tokens``
    media: PromptMedia = NO_MEDIA  # the parts of the prompt that are not text
    deadline: float = math.inf  # when it should be done, on the scheduler's clock
    patience_end: float = math.inf  # when it should have started, on the scheduler's clock

    # Under a grammar or a budget:
    next_mask: Callable[[], TokenWords] | None = None  # computes the tokens that its grammar allows next
    mask_error: Exception | None = None  # why they cannot be computed; then none is allowed
    is_steered: bool = False  # its tokens may be replaced, so each is read before the next is computed
    # Why its output is complete, while forced tokens still lack log-probabilities; otherwise empty.
    finish_reason: str = ""
    # How often a grammar replaced sampled tokens. It changes the random numbers of later tokens: the same
    # number at a position that is sampled again would favour some tokens.
    num_redrawn: int = 0

    # In the queue:
    arrival: int = -1  # its position among all requests, set once by the scheduler
    received_s: float = 0.0  # when it arrived, on the clock ``perf_counter``
    num_preemptions: int = 0
    status: Status = Status.WAITING
    is_held_back: bool = False  # in this step it does not fit into memory or into the step's time
    is_unencoded: bool = False  # it waits for the encoding of an image, for which a step had no time
    # While it waits for memory, others may start before it only in steps before this number. None: it was
    # neither preempted nor the first request that did not fit.
    passed_until: int | None = None

    # Its progress:
    num_computed: int = 0  # tokens with KV, including tokens of batches in flight
    num_pending: int = 0  # tokens that batches in flight will append
    wants_scores: bool = False  # the log-probabilities of its tokens are wanted
    # Output tokens (of a scoring: tokens from ``score_from`` on) whose log-probability is known, or will be
    # when the batches in flight have run.
    num_scored: int = 0
    num_cached: int = 0  # prompt tokens found in the cache when it was first admitted
    miss_reason: str = ""  # why many of its prompt's tokens were not in the cache then
    num_shared: int = 0  # tokens found in the cache when it was last admitted
    num_charged: int = 0  # up to this position its tokens and nodes have been charged to its tenant
    req_row: int = -1  # its row of ``req_to_token`` while it runs
    committed: PrefixMatch | None = None  # its locked prefix in the cache
    num_nodes_computed: int = 0  # nodes of its tree
    node_slots: SlotArray = field(default_factory=lambda: _NO_SLOTS)  # of these nodes; they are never cached

    # Its results:
    target_logprobs: list[float] = field(default_factory=list)  # of a select: of its tree's targets
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopTokens] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        submit: Submit,
        prompt: TokenArray,
        max_new_tokens: int,
        *,
        end_ids: tuple[int, ...] = (),
        media: Sequence[MediaRun] = (),
    ) -> Request:
        """A waiting request.

        Args:
            submit: The client's message; its ``token_ids`` are not read.
            prompt: [num_prompt] at least one token. ``media`` put their pseudo-tokens into a copy.
            max_new_tokens: The limit of the output.
            end_ids: Tokens that end it.
            media: The parts of the prompt that are not text, in order.

        Raises:
            BadArgument: The priority or weight is out of range, the choices are invalid, or an image is to be
                scored.
        """
        submit.origin.check()
        score_from, params = submit.score_from, submit.params or GREEDY
        tokens: TokenArray = np.empty(len(prompt) + max_new_tokens, dtype=np.int32)
        tokens[: len(prompt)] = prompt
        for run in media:
            tokens[run.start : run.end] = pseudo_tokens(run)
        if score_from and any(run.end > score_from for run in media):
            raise BadArgument("only text has log-probabilities, not an image", param="prompt")
        return cls(
            id=submit.request_id,
            tokens=tokens,
            num_tokens=len(prompt),
            num_prompt=len(prompt),
            max_new_tokens=max_new_tokens,
            params=params,
            origin=submit.origin,
            cache_key=CacheKey(submit.origin.tenant, submit.origin.cache_salt, submit.adapter),
            seed=submit.seed,
            score_from=score_from,
            wants_scores=score_from > 0 or params.wants_logprobs,
            tree=token_tree(submit.choices, submit.heads, submit.head_of) if submit.choices else None,
            embeds=submit.embeds,
            end_ids=end_ids,
            media=PromptMedia.of(tokens[: len(prompt)], media) if media else NO_MEDIA,
        )

    @property
    def tenant(self) -> str:
        return self.cache_key.tenant

    @property
    def adapter(self) -> str:
        return self.cache_key.adapter

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def num_to_compute(self) -> int:
        """Tokens and nodes that no batch computes yet, and whose KV or logits are needed."""
        return self.num_left_after(self.num_computed - self.num_pending, self.num_nodes_computed)

    def num_left_after(self, num_tokens: int, num_nodes: int) -> int:
        """Tokens and nodes to compute after the first ``num_tokens`` and ``num_nodes``. The last token of a
        scoring, or of a request that only needs scores, is only a target."""
        left = self.num_tokens - num_tokens
        if self.tree is not None:
            return left + self.tree.num_nodes - num_nodes
        return left - (1 if self.score_from or self.finish_reason else 0)

    @property
    def is_urgent(self) -> bool:
        """Whether a reader waits for each of its tokens."""
        return self.origin.objective == "latency"

    @property
    def will_decode(self) -> bool:
        """Whether it samples more than one token."""
        return self.max_new_tokens > 1

    @property
    def is_paced(self) -> bool:
        """Whether it is held back together with others of its tenant (``Pace.holds_back``)."""
        return not self.is_urgent and self.will_decode and not self.num_preemptions

    @property
    def first_unscored(self) -> int:
        """Index of the first token whose log-probability is still wanted: to be scored, or forced by a
        grammar. ``num_tokens`` if there is none."""
        if not self.wants_scores:
            return self.num_tokens
        return min((self.score_from or self.num_prompt) + self.num_scored, self.num_tokens)

    @property
    def num_nodes(self) -> int:
        """Nodes of its tree; 0 without one."""
        return 0 if self.tree is None else self.tree.num_nodes

    @property
    def num_nodes_left(self) -> int:
        """Nodes that are not computed yet."""
        return 0 if self.tree is None else self.tree.num_nodes - self.num_nodes_computed

    @property
    def num_reusable(self) -> int:
        """Leading tokens that may come from the cache. The first token whose logits are needed must be
        computed: the last token, or the one before the first that is scored; and with it the run of a medium
        that it is in, if this run attends both ways."""
        last = self.first_unscored - 1
        return self.media.whole_end(-1, last) if self.media.runs else last

    def reusable_run(self) -> TokenRun:
        """The tokens that may come from the cache."""
        return self.run(self.num_reusable)

    def run(self, count: int, start: int = 0) -> TokenRun:
        """Its tokens from ``start`` up to ``count``, as the cache has them."""
        if self.media.leads:
            return with_leads(self.tokens[:count], self.media.leads)[start:].tobytes()
        return self.tokens[start:count].tobytes()

    def cached_id(self, index: int) -> int:
        """The id of a token, as the cache has it."""
        return self.media.leads.get(index) or int(self.tokens[index])


def check_request(num_prompt: int, params: SamplingParams, info: RunnerInfo) -> None:
    """Raises the error with which the engine would reject a generation: ``BadArgument`` for a bias outside
    the vocabulary, or ``PromptTooLong``. For clients that must know before they submit."""
    _end_ids(params, info)
    _check_length(num_prompt, 1, min(info.max_context, info.num_slots), "its output")


def check_total_tokens(request: Request, max_total_tokens: int, total_slots: int) -> None:
    """Raises ``PromptTooLong`` for a request that could never run.

    Args:
        request: The request.
        max_total_tokens: The most tokens of a sequence: the smaller of the model's context and the KV pool.
        total_slots: The size of the KV pool.
    """
    num_prompt, tree = request.num_prompt, request.tree
    if tree is None:
        _check_length(num_prompt, min(request.max_new_tokens, 1), max_total_tokens, "its output")
        return
    _check_length(num_prompt, tree.longest, max_total_tokens, f"the {tree.longest} of its longest choice")
    if num_prompt + tree.num_nodes > total_slots:
        raise PromptTooLong(
            f"the prompt has {num_prompt} tokens and its choices {tree.num_nodes} to compute; "
            f"together they must fit into the KV pool of {total_slots}: offer fewer or shorter choices",
            param="choices",
        )


def _check_length(num_prompt: int, num_more: int, limit: int, more: str) -> None:
    if num_prompt + num_more > limit:
        raise PromptTooLong(
            f"the prompt has {num_prompt:,} tokens; with {more} it must fit into {limit:,} (the smaller of "
            "the model's context and the KV pool): shorten it",
            param="prompt",
        )


def make_request(message: Submit, info: RunnerInfo, max_total_tokens: int) -> Request:
    """The scheduler's request for a ``Submit``. Tokens that an engine generated before it died are part of
    it and will be computed again, as after a preemption. ``max_total_tokens``: limit of prompt and output.
    ``BadArgument`` for a parameter out of range."""
    params = message.params or GREEDY
    if not message.token_ids:
        raise EngineFailed("a request needs at least one token")
    token_ids = np.array(message.token_ids, dtype=np.int32)
    media = [MediaRun.of(run) for run in message.media]
    if np.count_nonzero(token_ids < 0) != sum([run.num_tokens for run in media]):
        raise EngineFailed("a prompt has negative token ids that are not of its images")
    if (last := int(token_ids.max())) >= info.vocab_size:
        raise BadArgument(
            f"the prompt has the token {last}, which the tokenizer has and the model does not: its ids are "
            f"0 to {info.vocab_size - 1}",
            param="prompt",
        )
    request = Request.of(
        message,
        token_ids,
        _output_limit(message, max_total_tokens),
        end_ids=_end_ids(params, info),
        media=media,
    )
    request.deadline = _time_in(message.origin.deadline_s)
    request.patience_end = _time_in(message.origin.patience_s)
    request.received_s = time.perf_counter()
    end = request.num_prompt + len(message.generated_ids)
    request.tokens[request.num_prompt : end] = message.generated_ids
    request.num_tokens = end
    request.num_redrawn = message.num_redrawn
    request.logprobs += message.generated_logprobs
    request.num_scored = len(request.logprobs)
    request.top_logprobs += message.generated_top_logprobs
    return request


def _output_limit(message: Submit, max_total_tokens: int) -> int:
    if message.params is None or message.score_from:
        return 0
    return min(message.params.max_tokens, max(1, max_total_tokens - len(message.token_ids)))


def _time_in(seconds: float | None) -> float:
    return math.inf if seconds is None else time.monotonic() + seconds


def _end_ids(params: SamplingParams, info: RunnerInfo) -> tuple[int, ...]:
    """Tokens of the vocabulary that end a generation. ``BadArgument`` for a bias outside the vocabulary."""
    for token_id, _ in params.logit_bias:
        if token_id >= info.vocab_size:
            raise BadArgument(
                f"gen: logit_bias has token {token_id}; this model's ids are 0 to {info.vocab_size - 1}",
                param="logit_bias",
            )
    own = () if params.ignore_eos else info.end_token_ids
    return tuple({token_id for token_id in (*own, *params.stop_token_ids) if token_id < info.vocab_size})


Work = tuple[Request, int]
"""A request, and how many of its tokens and nodes a step computes, from the first uncomputed one on."""
Targets = Sequence[tuple[int, int]]
"""The tokens of a row after which logits are needed, in order: index in the row, and target (-1: sample)."""

SAMPLED_ONCE: Targets = ((0, -1),)
"""The targets of a decode step."""


class Row:
    """One request in one batch."""

    # Class attributes are the defaults: most rows set few of these, and a step makes a row for each request.
    first_node: int = 0  # of a select's tree: the first node that the row computes
    num_nodes: int = 0  # nodes that it computes
    # Set when the batch has run:
    token_ids: Sequence[int] = ()  # the sampled tokens
    ranks: Sequence[int] = ()  # of scored tokens
    embedding: bytes = b""  # float32
    output: BatchOutput | None = None  # the batch's, if it has log-probabilities that the request may want
    first_output: int = 0  # the index of the row's first result in ``output``
    error: Exception | None = None  # the fault of this row, which affects no other row
    # Not None if the request left the batch while it was in flight. The row's results do not count then, and
    # these slots become free when the batch completes.
    withdrawn_slots: SlotArray | None = None

    def __init__(self, request: Request, start: int, num_tokens: int, targets: Targets) -> None:
        self.request = request
        self.start = start  # index of the first token that the row computes
        self.num_tokens = num_tokens  # tokens that it computes
        self.targets = targets  # where its tokens need logits
        self.end = start + num_tokens  # index of the first token after the row's tokens
        self.num_sampled = 1 if targets is SAMPLED_ONCE else sum([target < 0 for _, target in targets])

    @property
    def logprobs(self) -> list[float]:
        """The log-probabilities of scored and sampled tokens, in order; empty if none is wanted. Made at each
        reading: the next batch does not need them, so they are read while it runs."""
        output, first = self.output, self.first_output
        return [] if output is None else output.list_logprobs(first, first + len(self.targets))

    @property
    def tops(self) -> list[TopTokens]:
        """The requested number of likeliest tokens for each of ``logprobs``; empty if none is wanted."""
        output, first, num_top = self.output, self.first_output, self.request.params.top_logprobs
        if output is None or not num_top:
            return []
        return output.list_tops(first, first + len(self.targets), num_top)

    @property
    def is_last(self) -> bool:
        """Whether nothing of the request is left to compute after this row."""
        return self.request.num_left_after(self.end, self.first_node + self.num_nodes) == 0


def make_rows(work: Sequence[Work]) -> list[Row]:
    """Makes the rows of the requests' next tokens and nodes. Rows with one token come first, then rows with
    more, then rows with nodes only."""
    singles: list[Row] = []
    chunks: list[Row] = []
    nodes: list[Row] = []
    for request, count in work:
        start = request.num_computed
        num_left = request.num_tokens + request.num_pending - start
        if num_left == 1 and count == 1 and _is_plain(request):
            singles.append(Row(request, start, 1, SAMPLED_ONCE))
            continue
        num_tokens = count if count < num_left else num_left
        if num_tokens:
            row = Row(request, start, num_tokens, _targets(request, num_tokens))
            (singles if num_tokens == 1 else chunks).append(row)
        else:
            row = Row(request, start, 0, ())
            nodes.append(row)
        if num_tokens < count:
            row.first_node, row.num_nodes = request.num_nodes_computed, count - num_tokens
    return singles + chunks + nodes


def _is_plain(request: Request) -> bool:
    """Whether its last token has no other target than the next one, which is sampled."""
    if request.embeds or request.tree is not None or request.max_new_tokens <= 0:
        return False
    return not request.wants_scores or request.first_unscored == request.num_tokens


def _targets(request: Request, num_tokens: int) -> Targets:
    """The targets of the request's next ``num_tokens`` tokens. If several targets of a select follow one
    token, the first of them. An embedding has the target 0 after its last token."""
    start, end = request.num_computed, request.num_computed + num_tokens
    if request.embeds:
        return ((num_tokens - 1, 0),) if end == request.num_tokens else ()
    if request.tree is not None and end == request.num_tokens:
        has_target = request.tree.first_targets[1] > 0  # not if all choices follow heads
        return ((num_tokens - 1, int(request.tree.targets[0])),) if has_target else ()
    first_unscored = request.first_unscored
    if first_unscored == request.num_tokens:  # as in most steps
        if not request.max_new_tokens or end < request.num_tokens + request.num_pending:
            return ()
        return SAMPLED_ONCE if num_tokens == 1 else ((num_tokens - 1, -1),)
    scored = range(max(start, first_unscored - 1), min(end, request.num_tokens - 1))
    targets = [(p - start, int(request.tokens[p + 1])) for p in scored]
    is_last = end == request.num_tokens + request.num_pending
    if request.max_new_tokens and not request.finish_reason and is_last:
        targets.append((num_tokens - 1, -1))
    return targets
