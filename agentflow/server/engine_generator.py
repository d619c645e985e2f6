"""The engine as the interpreter sees it: contexts are token ids, so forks and turns are token-exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread

from agentflow.errors import AgentflowError, BadArgument, NotSupported
from agentflow.generator import Capabilities, Generated, OnText, Scored, Stats, Usage
from agentflow.sampling import SamplingParams
from agentflow.server.chat_template import ChatTemplate
from agentflow.server.engine_client import EngineClient
from agentflow.server.engine_messages import Finished
from agentflow.server.token_state import TokenState

# Text longer than this is encoded in a worker thread: about a millisecond of encoding.
MAX_INLINE_CHARS = 4000


@dataclass(eq=False)
class EngineContext:
    """One state in the engine: its tokens, and whose cached KV it may share."""

    tokens: TokenState
    cache_key: str
    num_unencoded_chars: int = 0


class EngineGenerator:
    """A ``Generator`` on a running engine. One engine serves many sessions and many generators of
    this kind; ``tenant`` separates their caches."""

    def __init__(self, client: EngineClient, template: ChatTemplate, *, tenant: str = "") -> None:
        self._client = client
        self._template = template
        self._tenant = tenant
        self._num_rerendered = 0
        info = client.info
        self.capabilities = Capabilities(
            model=info.model, roles=template.has_template, max_context=info.max_context
        )

    def open(self, cache_salt: str) -> EngineContext:
        """An empty state."""
        # The lengths keep ("a", "b/c") and ("a/b", "c") apart.
        cache_key = f"{len(self._tenant)}/{self._tenant}/{cache_salt}"
        return EngineContext(TokenState(self._client.tokenizer, self._template), cache_key)

    def fill(self, context: EngineContext, text: str) -> None:
        """Appends to the pending run of text, which is encoded when something ends it."""
        context.tokens.text(text)
        context.num_unencoded_chars += len(text)

    def begin_role(self, context: EngineContext, role: str) -> None:
        """Opens a turn under the chat template."""
        context.tokens.begin_role(role)

    def end_role(self, context: EngineContext) -> None:
        """Closes the turn."""
        context.tokens.end_role()

    async def generate(self, context: EngineContext, params: SamplingParams, on_text: OnText) -> Generated:
        """Generates, and appends the ids as they were generated."""
        token_ids = await self._prompt(context, "gen")
        end = await self._client.generate(
            token_ids, params, seed=params.seed or 0, cache_key=context.cache_key, on_text=on_text
        )
        context.tokens.generated(end.token_ids, end.text)
        logprobs = tuple(end.logprobs) if params.logprobs else None
        return Generated(end.text, end.finish_reason, _usage(end), logprobs)

    async def score(self, context: EngineContext, choices: Sequence[str], method: str) -> Scored:
        """Scores each choice's tokens after the context. The choices share the prefix: whichever
        is computed first puts it into the cache for the others."""
        if method != "token_length_normalized":
            raise NotSupported(f"select by {method} is not supported by the engine yet")
        prefix = await self._prompt(context, "select")
        encoded = [context.tokens.encode_next(choice) for choice in choices]
        done = await self._score_all(prefix, encoded, context.cache_key)
        logprobs = tuple(sum(value or 0.0 for value in end.logprobs) for end in done)
        scores = tuple(total / len(ids) for total, ids in zip(logprobs, encoded, strict=True))
        best = max(range(len(scores)), key=scores.__getitem__)
        context.tokens.generated(encoded[best], choices[best])
        return Scored(best, logprobs, scores, sum((_usage(end) for end in done), Usage()))

    async def _score_all(self, prefix: list[int], ends: list[list[int]], cache_key: str) -> list[Finished]:
        scored: dict[int, Finished] = {}
        failures: list[AgentflowError] = []

        async def score_one(index: int) -> None:
            try:
                scored[index] = await self._client.score(
                    prefix + ends[index], len(prefix), cache_key=cache_key
                )
            except AgentflowError as error:
                failures.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for index in range(len(ends)):
                group.start_soon(score_one, index)
        if failures:  # the first: the others mostly say the same
            raise failures[0]
        return [scored[index] for index in range(len(ends))]

    async def fork(self, context: EngineContext, count: int) -> list[EngineContext]:
        """Contexts with the same ids."""
        await self._encode(context)
        return [EngineContext(context.tokens.fork(), context.cache_key) for _ in range(count)]

    def free(self, context: EngineContext) -> None:
        """Nothing is held for an idle context: its KV is cache."""
        self._num_rerendered += context.tokens.num_rerendered_tokens

    async def stats(self) -> Stats:
        """Of the engine, all sessions together."""
        stats = await self._client.stats()
        return Stats(
            model=stats.model,
            steps=stats.steps,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            computed_tokens=stats.computed_tokens,
            generated_tokens=stats.generated_tokens,
            evicted_tokens=stats.evicted_tokens,
            rerendered_tokens=self._num_rerendered,
            retractions=stats.retractions,
            free_slots=stats.free_slots,
            cached_slots=stats.cached_slots,
            held_slots=stats.held_slots,
            total_slots=stats.total_slots,
            running=stats.running,
            waiting=stats.waiting,
            peak_resident_bytes=stats.peak_resident_bytes,
            restarts=stats.restarts,
        )

    async def _prompt(self, context: EngineContext, what: str) -> list[int]:
        await self._encode(context)
        token_ids = context.tokens.ids()
        if not token_ids:
            raise BadArgument(f"{what} on an empty state: append some text or a turn first")
        return token_ids

    async def _encode(self, context: EngineContext) -> None:
        """Encodes what was appended, in a thread where it is much. The state's ops run one after the
        other, so nobody else touches the tokens meanwhile."""
        if context.num_unencoded_chars > MAX_INLINE_CHARS:
            await anyio.to_thread.run_sync(context.tokens.cut)
        else:
            context.tokens.cut()
        context.num_unencoded_chars = 0


def _usage(end: Finished) -> Usage:
    return Usage(end.prompt_tokens, end.cached_tokens, end.output_tokens)
