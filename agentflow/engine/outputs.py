"""The outputs of an engine's requests: from sampled tokens to messages.

A request's tokens become text, which may end it (``detokenizer``). A grammar, or the budget of its reasoning
(``constrained``), may force the tokens that follow. ``Outputs`` reports them, and the end of the request.

A token whose text cannot end its request is put aside: the next batch does not depend on its text. ``report``
decodes it and makes its message while that batch runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from agentflow.engine.constrained.constrained_request import ConstrainedRequest, constrained_request
from agentflow.engine.constrained.grammar_cache import GrammarCache
from agentflow.engine.constrained.jump_forward import Jump
from agentflow.engine.messages import Finished, FromEngine, Progress
from agentflow.engine.request import Request, Row, Submit, TopTokens
from agentflow.engine.scheduling.scheduler import Scheduler
from agentflow.engine.text.detokenizer import TextEnd
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.bounds.cpu_allowance import CpuAllowance
from agentflow.protocol.text.stop_pattern import shared_time

MAX_TENANTS = 4096
"""Tenants whose time for searches is remembered."""


class _Position(NamedTuple):
    """The position of a token in its output."""

    is_free: bool = False  # stops ignore the token
    calls_from: int = 0  # ``ConstrainedRequest.calls_from`` after it


_Aside = tuple[Row, _Position, int | None]
"""A row with one token, its position, and ``ConstrainedRequest.answer_at`` after it."""

_ANSWER = _Position()


def _read(constrained: ConstrainedRequest | None, token_id: int) -> _Position:
    """Reads a token of an output that may begin with reasoning."""
    if constrained is None:
        return _ANSWER
    is_free = not constrained.read(token_id)
    return _Position(is_free, constrained.calls_from)


def _push(text: TextEnd, token_id: int, position: _Position) -> str:
    """Appends a token to the text of its output. Returns the text that may be delivered now."""
    return text.push(token_id, is_free=position.is_free, calls_from=position.calls_from)


def _progress(row: Row, text: str, answer_at: int | None) -> Progress:
    """The message about sampled tokens, whose log-probabilities are appended to their request's."""
    request = row.request
    logprobs, tops = _keep_likelihoods(row)
    reported = logprobs if request.params.wants_logprobs else ()
    return Progress(request.id, text, row.token_ids, reported, tops, answer_at=answer_at)


def _keep_likelihoods(row: Row) -> tuple[Sequence[float], Sequence[TopTokens]]:
    """Appends the row's log-probabilities to its request's. Returns them, and the likeliest tokens."""
    request = row.request
    if not request.wants_scores:  # a batch has log-probabilities for all requests or for none
        return (), ()
    logprobs, tops = row.logprobs, row.tops
    request.logprobs += logprobs
    request.top_logprobs += tops
    request.ranks += row.ranks
    return logprobs, tops


class Outputs:
    """The outputs of the unfinished requests of one engine.

    Args:
        scheduler: gets forced tokens, and the requests that have ended.
        tokenizer: the model's tokenizer.
        grammars: the grammars of the requests.
        end_ids: the model's end tokens.
        outbox: gets the messages. The caller empties it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        grammars: GrammarCache,
        end_ids: Collection[int],
        outbox: list[FromEngine],
    ) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._end_ids = end_ids
        self._outbox = outbox
        self._texts: dict[int, TextEnd] = {}
        self._searches: OrderedDict[str, CpuAllowance] = OrderedDict()  # by tenant, least recently used first
        self._constrained: dict[int, ConstrainedRequest] = {}
        self._aside: list[_Aside] = []  # in the order of the batch

    def __len__(self) -> int:
        return len(self._texts)

    def begin(self, request: Request, message: Submit) -> None:
        """Prepares a request that is about to enter the queue. Reads the tokens that a dead engine generated,
        whose text the client already has. Applies the request's grammar and the budget of its reasoning, and
        appends the tokens that these force first."""
        params = message.params
        if params is None or message.score_from:
            return
        calls = message.calls if params.stop or params.stop_regex or params.stop_token_ids else None
        text = self._texts[request.id] = TextEnd(
            self._tokenizer,
            params.stop,
            stop_regex=params.stop_regex,
            min_tokens=params.min_tokens,
            calls=calls,
            searches=self._search_time(request.tenant) if params.stop_regex else None,
        )
        constrained = None
        if message.constraint is not None or message.reasoning_format is not None:
            request.is_steered = True
            constrained = constrained_request(request, message, self._grammars, self._tokenizer)
            self._constrained[request.id] = constrained
        for token_id in message.generated_ids:
            _push(text, token_id, _read(constrained, token_id))
        if message.generated_text:
            text.resume(message.generated_text)
        jump = None if constrained is None else constrained.begin(message.generated_forced)
        if jump is not None and not text.stopped:
            self._jump(request, text, jump)

    def _search_time(self, tenant: str) -> CpuAllowance:
        found = self._searches.setdefault(tenant, shared_time())
        self._searches.move_to_end(tenant)
        if len(self._searches) > MAX_TENANTS:
            self._searches.popitem(last=False)
        return found

    def advance(self, row: Row) -> None:
        """Applies the results of one row to its request, and reports them."""
        request, params = row.request, row.request.params
        if not row.token_ids:
            logprobs, tops = _keep_likelihoods(row)
            if request.id in self._texts and params.wants_logprobs and logprobs:  # of forced tokens
                self._outbox.append(Progress(request.id, "", (), logprobs, tops))
            if row.is_last:
                self._finish(request, request.finish_reason or "length", embedding=row.embedding)
            return
        [token_id] = row.token_ids
        text, constrained = self._texts[request.id], self._constrained.get(request.id)
        answer_at, jump = None, None
        if token_id in self._end_ids and not params.ignore_eos:
            if constrained is None or not constrained.must_answer:
                _keep_likelihoods(row)
                self._finish(request, "eos")
                return
            jump = constrained.end_reasoning()
            if jump is None:  # there is no room for the end mark
                _keep_likelihoods(row)
                self._finish(request, "length")
                return
            self._report(row, "", constrained.answer_at)
        elif token_id in params.stop_token_ids and not (
            text.is_in_call or (constrained is not None and constrained.is_reasoning)
        ):
            _keep_likelihoods(row)
            self._finish(request, "stop", token_id)
            return
        elif text.may_stop:
            position = _read(constrained, token_id)
            if constrained is not None:
                answer_at = constrained.answer_at
            self._report(row, _push(text, token_id, position), answer_at)
            if constrained is not None and not text.stopped:
                jump = constrained.update()
        else:
            is_over = request.num_tokens - request.num_prompt >= request.max_new_tokens
            position = _read(constrained, token_id)
            if constrained is not None and not constrained.is_open:
                answer_at, jump = constrained.answer_at, constrained.update()
                is_over = is_over or (jump is None and constrained.is_complete())
            if jump is None and not is_over:
                self._aside.append((row, position, answer_at))
                return
            self._report(row, _push(text, token_id, position), answer_at)
        if jump is not None:
            self._jump(request, text, jump)
        self.end_if_complete(request)

    def report(self) -> list[tuple[Request, Exception]]:
        """Reports the tokens that were put aside, before all other messages: they are the oldest. Returns the
        requests for which this fails, with the errors."""
        aside, self._aside = self._aside, []
        messages: list[FromEngine] = []
        failed: list[tuple[Request, Exception]] = []
        for row, position, answer_at in aside:
            text = self._texts.get(row.request.id)
            if text is None:
                continue
            try:
                messages.append(_progress(row, _push(text, row.token_ids[0], position), answer_at))
            except Exception as error:
                failed.append((row.request, error))
        self._outbox[:0] = messages
        return failed

    def _report(self, row: Row, text: str, answer_at: int | None) -> None:
        """Reports sampled tokens."""
        self._outbox.append(_progress(row, text, answer_at))

    def _jump(self, request: Request, text: TextEnd, jump: Jump) -> None:
        """Appends the tokens that the grammar, or the budget of reasoning, forces, up to a stop among
        them."""
        num_dropped = request.num_generated - jump.num_kept
        calls_from = self._constrained[request.id].calls_from
        delta = text.replace(jump.num_kept, jump.token_ids, is_free=jump.is_free, calls_from=calls_from)
        token_ids = jump.token_ids[: text.num_ids - jump.num_kept]
        self._scheduler.replace_output(request, jump.num_kept, token_ids)
        answer_at = self._constrained[request.id].answer_at
        self._outbox.append(
            Progress(request.id, delta, token_ids, (), (), num_dropped, jump.forced, answer_at)
        )

    def end_if_complete(self, request: Request) -> None:
        """Ends the request if its text is complete or it has reached its limit of tokens."""
        text, constrained = self._texts[request.id], self._constrained.get(request.id)
        if text.stopped or (constrained is not None and constrained.is_complete()):
            self._finish_when_scored(request, "stop")
        elif request.num_generated >= request.max_new_tokens:
            self._finish_when_scored(request, "length")

    def _finish_when_scored(self, request: Request, reason: str) -> None:
        """Ends the request, once the log-probabilities of its forced tokens are computed."""
        if request.wants_scores and request.first_unscored < request.num_tokens:
            request.finish_reason = reason
        else:
            self._finish(request, reason)

    def _finish(
        self, request: Request, reason: str, stopped_by: int | None = None, embedding: bytes = b""
    ) -> None:
        text_end, tree = self._texts.get(request.id), request.tree
        constrained = self._constrained.get(request.id)
        num_forced = 0 if constrained is None else constrained.num_forced(request.num_generated)
        token_ids: list[int] = []
        text = ""
        logprobs: list[float | None] = [*request.logprobs]
        top_logprobs: list[TopTokens | None] = [*request.top_logprobs]
        if text_end is not None:
            ending = text_end.finish()
            if text_end.stopped:  # perhaps only now: no call follows
                reason = "stop"
            token_ids, text = ending.ids, ending.text
            reencoded: list[None] = [None] * (len(token_ids) - ending.kept)
            logprobs = [*logprobs[: ending.kept], *reencoded] if logprobs else []
            top_logprobs = [*top_logprobs[: ending.kept], *reencoded] if top_logprobs else []
        finished = Finished(
            request_id=request.id,
            token_ids=token_ids,
            text=text,
            finish_reason=reason,
            prompt_tokens=request.num_prompt,
            cached_tokens=request.num_cached,
            output_tokens=request.num_generated,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            choice_logprobs=[] if tree is None else tree.by_choice(request.target_logprobs),
            stopped_by=stopped_by if text_end is None or text_end.stop is None else text_end.stop,
            forced=[] if constrained is None else constrained.forced_spans(len(text)),
            forced_tokens=num_forced,
            embedding=embedding,
            reasoning_tokens=0 if constrained is None else constrained.num_reasoning_tokens,
            answer_at=None if constrained is None else constrained.answer_at,
            ranks=request.ranks,
            miss_reason=request.miss_reason,
        )
        self._scheduler.finish(request, num_forced)  # first: if it fails, the request has another end
        self._outbox.append(finished)

    def drop(self, request_id: int) -> None:
        """Forgets a request that has ended or failed."""
        self._texts.pop(request_id, None)
        self._constrained.pop(request_id, None)
