"""From a state to a request: the tenant's gate, the state's images, and the encoding of its text.

A request passes the gate (``TenantRequests.admitted``). Then its images are read and its text is encoded,
long text in a few threads of the tenant, so that the event loop continues and the threads of others stay
free. It begins (``begin``) once it is known to fit; until then nothing is charged to the tenant.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread

from agentflow.engine.client import EngineClient
from agentflow.engine.generator.context import CHARS_PER_TOKEN, EngineContext, PromptLimits
from agentflow.engine.media_run import PreparedMedium
from agentflow.engine.tenant import AdmittedRequest, RequestGate, Tenant
from agentflow.engine.text.state.choices import WINDOW_CHARS, EncodedChoices
from agentflow.engine.watching.tenant_stats import TenantStats
from agentflow.errors import BadArgument
from agentflow.protocol.events import Usage
from agentflow.protocol.images import Image, MediumKind, Video
from agentflow.runtime.task_group import first_error, open_task_group

ResultT = TypeVar("ResultT")
ArgTs = TypeVarTuple("ArgTs")

# Longer text is encoded in a worker thread. Encoding this much takes about a millisecond.
MAX_INLINE_CHARS = 4000
# The worker threads of each tenant.
ENCODING_THREADS = 4
# The images and videos of one state that are read at the same time.
MOST_AT_ONCE = 4


class MediaPreparer(Protocol):
    """Prepares images and videos for a model (``media.reader``). ``image_token``, ``video_token``: the text
    that a chat template writes for a medium, and that the medium's pieces replace. Without a ``video_token``,
    the model reads no videos."""

    image_token: str
    video_token: str

    async def read_image(self, image: Image, *, tenant: str = "") -> PreparedMedium:
        """Returns the image as the model reads it. ``BadArgument`` with the ``param`` ``image``."""
        ...

    async def read_video(self, video: Video, *, tenant: str = "") -> PreparedMedium:
        """Returns the frames of a video as the model reads them. ``BadArgument`` with the ``param`` ``video``
        or ``num_frames``."""
        ...


class TenantRequests:
    """The requests of one tenant to one model, and the encoding of its states.

    Args:
        client: the engine.
        tenant: the tenant.
        gate: limits its requests; None: no limits.
        model: its public name.
        reader: prepares images and videos; None: the model has no vision.
    """

    def __init__(
        self,
        client: EngineClient,
        tenant: Tenant,
        gate: RequestGate | None,
        model: str,
        reader: MediaPreparer | None,
    ) -> None:
        self.client = client
        self.tenant = tenant
        self.gate = gate
        self.reader = reader
        self.limits = PromptLimits(client.tokenizer, client.info)
        self.stats = TenantStats(tenant, model)
        self.threads = anyio.CapacityLimiter(ENCODING_THREADS)  # of this tenant only
        self.placeholder_tokens: Mapping[MediumKind, str] = {}
        """The texts that stand for an image and for a video."""
        if reader is not None:
            self.placeholder_tokens = {"image": reader.image_token, "video": reader.video_token}

    @property
    def is_unlimited(self) -> bool:
        """Whether the tenant has no limit on tokens and requests."""
        return self.gate is None or self.gate.is_unlimited(self.tenant)

    @asynccontextmanager
    async def admitted(
        self, context: EngineContext | None = None, num_chars: int = 0
    ) -> AsyncIterator[AdmittedRequest]:
        """The scope of a request that generates or scores text after the context, or of other work that
        counts as a request of the tenant. Raises ``RateLimited``.

        Args:
            context: the state.
            num_chars: further characters of the prompt.
        """
        if self.gate is None:
            yield AdmittedRequest(0)
            return
        if (leasing := self.gate.ready(self.tenant)) is not None:
            await leasing
        num_tokens = num_chars // CHARS_PER_TOKEN
        if context is not None:
            num_tokens += context.num_guessed_tokens
        with self.gate.request(self.tenant, num_tokens) as admitted:
            admitted.prompt_tokens = 0  # until the engine has the request
            yield admitted

    def begin(self, admitted: AdmittedRequest, num_tokens: int, context: EngineContext | None = None) -> None:
        """An admitted request has a prompt of ``num_tokens`` tokens, and is sent next. Raises ``Overloaded``
        if the engine or the tenant has reached its limit of unfinished requests."""
        self.client.check_room(self.tenant.name)
        admitted.prompt_tokens = num_tokens
        if context is not None:
            context.has_run = True
            self.stats.rerendered_tokens += context.note_rerendered()
            self.end_fill_ahead(context)

    def done(self, admitted: AdmittedRequest, usage: Usage) -> None:
        """An admitted request has ended. Counts it in the tenant's own figures, if the tenant does not see
        the engine's."""
        admitted.cached_tokens, admitted.output_tokens = usage.cached_tokens, usage.output_tokens
        if not self.tenant.sees_metrics:
            self.stats.count(usage)

    def end_fill_ahead(self, context: EngineContext) -> None:
        """Ends the request that computes known tokens of the state, which stay in the cache. Otherwise the
        state's next request would wait for a request of low priority."""
        if context.filled_ahead is not None:
            self.client.forget(context.filled_ahead.request_id)
            context.filled_ahead = None

    async def prompt_ids(self, context: EngineContext) -> list[int]:
        """Returns the current prompt's ids. Raises ``BadArgument`` if there are none."""
        await self.read_media(context)
        token_ids = await self.run_off_loop(context.num_to_encode, context.encoded_ids)
        context.mark_encoded()
        if not token_ids:
            raise BadArgument("gen on an empty state: append some text or a turn first")
        return token_ids

    async def encode(self, context: EngineContext) -> None:
        """Encodes appended text, unless the template rejects the conversation so far. The state's ops run one
        after the other, so nothing else changes the tokens meanwhile."""
        await self.read_media(context)
        await self.run_off_loop(context.num_to_encode, context.encode)
        if context.tokens.is_settled:
            context.mark_encoded()

    async def encode_choices(self, context: EngineContext, choices: Sequence[str]) -> EncodedChoices:
        """Encodes the choices of a select after the context. Raises ``BadArgument`` if it is empty."""
        num_chars = context.num_to_encode + sum(map(len, choices)) + WINDOW_CHARS * len(choices)
        await self.read_media(context)
        encoded = await self.run_off_loop(num_chars, context.tokens.encode_choices, choices)
        if not encoded.num_before and not encoded.text:
            raise BadArgument("select on an empty state: append some text or a turn first")
        return encoded

    async def check_texts(self, texts: Iterable[str], most: int | None = None) -> None:
        """Runs ``PromptLimits.checking_texts`` for ``most`` tokens (None: the model's limit) in a worker
        thread. It ends soon after the caller is cancelled. Raises ``PromptTooLong``."""
        steps = self.limits.checking_texts(list(texts), most)
        num_chars = next(steps, 0)
        while num_chars:
            num_chars = await self.run_off_loop(num_chars, next, steps, 0)

    async def run_off_loop(
        self, amount: int, encode: Callable[[Unpack[ArgTs]], ResultT], *arguments: *ArgTs
    ) -> ResultT:
        """Calls a function that processes ``amount`` characters or tokens, in a thread if that takes long."""
        if amount > MAX_INLINE_CHARS:
            return await anyio.to_thread.run_sync(encode, *arguments, limiter=self.threads)
        return encode(*arguments)

    async def read_media(self, context: EngineContext) -> None:
        """Reads the images and videos that were appended. Cancelling it cancels the reading.

        Raises:
            BadArgument: one of them cannot be read.
            Overloaded: the media of the tenant, or of all, take too much memory.
            PromptTooLong: the media have too many tokens.
        """
        media = list(context.tokens.unread.values())
        if not media:
            return
        reader, left, num_tokens = self.reader, iter(media), 0
        assert reader is not None

        async def read() -> None:
            nonlocal num_tokens
            for medium in left:
                if isinstance(medium, Video):
                    prepared = await reader.read_video(medium, tenant=self.tenant.name)
                else:
                    prepared = await reader.read_image(medium, tenant=self.tenant.name)
                num_tokens += context.tokens.prepared(
                    medium, self.client.add_medium(prepared, self.tenant.name)
                )
                self.limits.check_num_tokens(num_tokens)  # if they are too long, no more are read

        if len(media) == 1:
            await read()
            return
        try:
            async with open_task_group() as group:
                for _ in range(min(MOST_AT_ONCE, len(media))):
                    group.start_soon(read)
        except ExceptionGroup as failed:  # several, perhaps for the same reason
            raise first_error(failed) from failed
