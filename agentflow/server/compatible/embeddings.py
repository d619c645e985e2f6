"""Answers with embeddings, which can have many numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

from agentflow.server.http.call import ApiCall

# More numbers are written in a thread.
MAX_INLINE_NUMBERS = 16_384


async def reply_written(
    call: ApiCall, vectors: Sequence[NDArray[np.float32]], answer: Callable[[], msgspec.Struct]
) -> None:
    """Replies with the result of ``answer``. If the embeddings have many numbers, the result is made and
    encoded in a thread of the tenant."""

    def written() -> bytes:
        return msgspec.json.encode(answer())

    if sum(map(len, vectors)) <= MAX_INLINE_NUMBERS:
        await call.reply(written())
        return
    limiter = call.service.body_threads(call.tenant)
    await call.reply(await anyio.to_thread.run_sync(written, limiter=limiter))
