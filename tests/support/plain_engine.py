"""An engine to read first: it answers as the real one does, and nothing in it makes it fast.

A request waits in a queue. When there are slots for its tokens, it joins the batch. Each step computes the
tokens that a request lacks, and samples one more, until its text ends. The computed tokens then stay as a
cache: later requests copy the longest common prefix, until its slots are needed.

The tests compare the real engine with it on random requests. ``docs/internals/plain-engine.md`` walks through
it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from support.engine.plain_constrained import PlainConstrained
from support.plain_sampler import plain_token_of

from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.sampling import SamplingParams


class Model(Protocol):
    """A language model: a function of all tokens before."""

    vocab_size: int
    end_id: int

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The logits [vocab_size] of the token after ``tokens``."""

    def logprob(self, tokens: Sequence[int], token: int) -> float:
        """The log-probability of ``token`` after ``tokens``."""


@dataclass(frozen=True)
class End:
    """The result of a request."""

    text: str
    ids: list[int]  # of exactly ``text``
    reason: str  # ``eos``, ``stop`` or ``length``
    num_sampled: int  # tokens, including the one that ended the text
    logprobs: Sequence[float | None] = ()  # of each id; None for an id that was encoded again
    choice_logprobs: Sequence[list[float]] = ()  # of each token of each choice


@dataclass(eq=False)
class Request:
    """A generation after ``prompt``, or a scoring of ``choices`` after it."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    owner: str = ""  # only requests of the same owner share computed tokens
    matcher: PlainConstrained | None = None
    choices: Sequence[list[int]] = ()
    output: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)  # the tokens whose keys and values are in slots
    num_cached: int | None = None  # tokens copied from the cache when it first joined the batch
    end: End | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class PlainEngine:
    """Serves ``model``. ``num_slots``: the tokens that the memory holds; one request needs at most
    ``max_context`` of them. ``max_running``: the most requests in the batch."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        num_slots: int = 4096,
        max_context: int = 512,
        max_running: int = 8,
    ) -> None:
        assert max_context <= num_slots
        self.model = model
        self.tokenizer = tokenizer
        self.num_slots = num_slots
        self.max_context = max_context
        self.max_running = max_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        # Owners and computed tokens, the least recently used first.
        self.cache: list[tuple[str, list[int]]] = []

    def submit(self, prompt: Sequence[int], params: SamplingParams, **options) -> Request:
        """Queues a request. ``options``: fields of ``Request``."""
        max_tokens = min(params.max_tokens, self.max_context - len(prompt))
        request = Request([*prompt], params, max_tokens, **options)
        if request.matcher is not None:
            self._append(request, [])  # the constraint may force the beginning, or all of it
        if request.end is None:
            self.waiting.append(request)
        return request

    def run(self) -> None:
        """Steps until no request is left."""
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Computes one token, at least, of each request in the batch."""
        self._free_slots()
        while self.waiting and len(self.running) < self.max_running and self._has_slots_for(self.waiting[0]):
            self._admit(self.waiting.popleft())
        for request in [*self.running]:
            request.computed = request.tokens  # prefill: many tokens; decode: the last one
            if request.choices:
                self._score(request)
            else:
                self._sample(request)
            if request.end is not None:
                self.running.remove(request)
                self._keep(request)

    # Memory

    @property
    def num_used(self) -> int:
        """Slots that the batch and the cache use."""
        in_batch = sum(len(request.tokens) for request in self.running)
        return in_batch + sum(len(computed) for _, computed in self.cache)

    def _free_slots(self) -> None:
        """Makes room for the token that each running request sampled: evicts cache, then preempts."""
        while self.num_used > self.num_slots:
            if self.cache:
                self.cache.pop(0)
            else:
                last = self.running.pop()
                last.computed = []
                self.waiting.appendleft(last)

    def _has_slots_for(self, request: Request) -> bool:
        cached = sum(len(computed) for _, computed in self.cache)
        return self.num_used - cached + len(request.tokens) <= self.num_slots

    def _admit(self, request: Request) -> None:
        """Moves a request into the batch with the longest cached prefix. The last token is always computed:
        its logits choose the next one."""
        own = [entry for entry in self.cache if entry[0] == request.owner]
        best = max(own, key=lambda entry: num_common(entry[1], request.tokens[:-1]), default=None)
        if best is not None:
            request.computed = best[1][: num_common(best[1], request.tokens[:-1])]
            self.cache.remove(best)
            self.cache.append(best)  # the most recently used
        if request.num_cached is None:
            request.num_cached = len(request.computed)
        self.running.append(request)
        self._free_slots()

    def _keep(self, request: Request) -> None:
        """The computed tokens of a request that ended are cached."""
        kept = (request.owner, request.computed)
        is_part = [owner == request.owner and part == kept[1][: len(part)] for owner, part in self.cache]
        self.cache = [entry for entry, covered in zip(self.cache, is_part, strict=True) if not covered]
        self.cache.append(kept)

    # Tokens

    def _score(self, request: Request) -> None:
        """Scores each choice by itself, token by token."""
        scores = [
            [self.model.logprob([*request.prompt, *choice[:n]], token) for n, token in enumerate(choice)]
            for choice in request.choices
        ]
        request.end = End("", [], "stop", 0, choice_logprobs=scores)

    def _sample(self, request: Request) -> None:
        """Samples the next token, and ends the request or appends it."""
        params, matcher = request.params, request.matcher
        ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {self.model.end_id})
        vocabulary = set(range(self.model.vocab_size))
        may_end = matcher is None or matcher.may_end()
        allowed = vocabulary if matcher is None else matcher.allowed() | (ends if may_end else set())
        if len(request.output) < params.min_tokens and allowed - ends:
            allowed = allowed - ends
        token = plain_token_of(
            self.model.logits(request.computed),
            params,
            request.prompt,
            request.output,
            forbidden=vocabulary - allowed,
            seed=request.seed,
            num_redrawn=0 if matcher is None else matcher.num_redrawn,
        )
        if token in ends and may_end:
            is_eos = token == self.model.end_id and not params.ignore_eos
            self._finish(request, self._text(request.output), "eos" if is_eos else "stop", token)
        else:
            self._append(request, [token])

    def _append(self, request: Request, tokens: list[int]) -> None:
        """Appends sampled tokens and the tokens that the constraint forces. Ends the request where its text
        or its length does."""
        matcher, params = request.matcher, request.params
        request.output = request.output + tokens
        if matcher is not None:
            for token in tokens:
                matcher.accept(token)
            matcher.jump(request.max_tokens)  # may encode the text so far in other tokens
            request.output = matcher.ids
            del request.computed[num_common(request.computed, request.tokens[:-1]) :]
        text = self._text(request.output)
        free = self._text(request.output[: params.min_tokens])  # in which no stop begins
        if (kept := before_stop(text, params, len(free))) is not None:
            self._finish(request, kept, "stop")
        elif matcher is not None and matcher.must_end():
            self._finish(request, text, "stop")
        elif len(request.output) >= request.max_tokens:
            self._finish(request, text, "length")

    def _finish(self, request: Request, text: str, reason: str, *end_token: int) -> None:
        """Ends a request. The part of a token before a stop string is encoded again."""
        kept: list[int] = []
        for token in request.output:
            if len(self._bytes([*kept, token])) > len(text.encode()):
                break
            kept.append(token)
        ids = kept + self.tokenizer.encode_exact(text[len(self._text(kept)) :], continues=True)
        logprobs: list[float | None] = []
        if request.params.wants_logprobs:
            logprobs = [
                self.model.logprob([*request.prompt, *kept[:n]], kept[n]) if n < len(kept) else None
                for n in range(len(ids))
            ]
        num_sampled = len(request.output) + len(end_token)
        request.end = End(text, ids, reason, num_sampled, logprobs)

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join([self.tokenizer.token_bytes(token) for token in ids])

    def _text(self, ids: list[int]) -> str:
        """The text of ``ids``, without half a character at the end."""
        return self._bytes(ids).decode(errors="ignore")


def before_stop(text: str, params: SamplingParams, start: int) -> str | None:
    """The text before a stop that begins at ``start`` or later: the stop that is complete first, and of
    several such stops the earliest one. None: there is no stop."""
    for end in range(start + 1, len(text) + 1):
        begins = [end - len(stop) for stop in params.stop if text.endswith(stop, start, end)]
        if params.stop_regex is not None:
            found = re.compile(params.stop_regex).search(text[:end], start)
            begins += [] if found is None else [found.start()]
        if begins:
            return text[: min(begins)]
    return None


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
