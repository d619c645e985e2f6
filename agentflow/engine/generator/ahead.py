"""Computes the tokens that a state's next requests will need, before these are sent.

Only for tenants without rate limits: such tokens are not charged. Nothing is computed for fewer than
``MIN_AHEAD_TOKENS`` missing tokens, which hardly delay the next request.
"""

from __future__ import annotations

import msgspec

from agentflow.engine.generator.context import EngineContext, FilledAhead, PrefilledAhead
from agentflow.engine.generator.requests import MAX_INLINE_CHARS, TenantRequests
from agentflow.engine.messages import Finished
from agentflow.engine.request import MAX_PRIORITY, Origin
from agentflow.engine.text.common_prefix import common_prefix
from agentflow.errors import AgentflowError
from agentflow.protocol.chat import Message

MIN_AHEAD_TOKENS = 32


class PrefixesAhead:
    """Computes the beginnings of one tenant's next prompts."""

    def __init__(self, requests: TenantRequests) -> None:
        self._requests = requests
        self._client = requests.client

    def announced(self, context: EngineContext) -> None:
        """Computes the prefix of a state that will be forked, if little text must be encoded for that. The
        state's text stays open: its end is encoded again with the text that follows."""
        if context.num_to_encode <= MAX_INLINE_CHARS and not context.tokens.unread:
            self.fork(context)

    def fork(self, context: EngineContext) -> None:
        """Computes the current prefix, before forks need it. Computes nothing if the template rejects the
        conversation so far, which more turns may complete."""
        if not self._requests.is_unlimited:
            return
        try:
            token_ids = context.tokens.ids()
        except AgentflowError:  # the next request reports it
            return
        if len(token_ids) - context.tokens.num_computed < MIN_AHEAD_TOKENS:
            return
        if context.prefill_ahead is not None:
            self._client.forget(context.prefill_ahead.request_id)
        request_id = self._client.compute_ahead(
            token_ids, origin=msgspec.structs.replace(context.origin_ahead(), trace="")
        )
        context.prefill_ahead = PrefilledAhead(request_id, token_ids)
        context.tokens.num_computed, context.has_run = len(token_ids), True

    async def fill(self, context: EngineContext) -> None:
        """Computes the tokens of a waiting state that are known, at the lowest priority of the tenant. Ends
        when the state's next request begins, which computes the rest at its own priority."""
        if not self._requests.is_unlimited:
            return
        before = context.filled_ahead.num_tokens if context.filled_ahead is not None else 0
        try:
            self._requests.limits.check_length(context.num_unencoded_chars)
            await self._requests.read_media(context)
            token_ids = await self._requests.run_off_loop(context.num_to_encode, context.tokens.ids_ahead)
        except AgentflowError:  # the state's next request reports it
            return
        if context.is_freed:  # while a thread encoded its text
            return
        known = max(before, min(context.tokens.num_computed, context.tokens.num_kept(token_ids)))
        if context.prefill_ahead is not None:
            known = max(known, common_prefix(context.prefill_ahead.token_ids, token_ids))
        if len(token_ids) - known < MIN_AHEAD_TOKENS:
            return
        self._requests.end_fill_ahead(context)
        request_id = self._client.compute_ahead(token_ids, origin=_low_priority(context))
        context.filled_ahead, context.has_run = FilledAhead(request_id, len(token_ids)), True

    async def fill_next_turn(self, context: EngineContext, end: Finished, answer: Message) -> None:
        """Computes the beginning of the next prompt of a conversation, after its answer: many templates write
        past answers in another way, without their reasoning. The context does not change, and the engine
        continues after it is freed."""
        if not self._requests.is_unlimited or not end.token_ids:
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
            amount = tokens.num_settled + len(end.token_ids)
            token_ids = await self._requests.run_off_loop(amount, next_ids)
        except AgentflowError:  # the next request reports it
            return
        if len(token_ids) - min(tokens.num_computed, tokens.num_kept(token_ids)) >= MIN_AHEAD_TOKENS:
            origin = _low_priority(context)
            state = origin.state if context.outlived else 0
            self._client.compute_ahead(token_ids, origin=msgspec.structs.replace(origin, state=state))


def _low_priority(context: EngineContext) -> Origin:
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
