"""Computes the embeddings of a request and writes its answer, in a thread if it is large."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

from agentflow.engine.generator.embedding import EmbeddingInput
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.protocol.events import Usage
from agentflow.runtime.generator import EmbeddingOptions
from agentflow.server.errors import unsupported
from agentflow.server.http.call import ApiCall
from agentflow.server.models.models import TextGenerator

# An answer with more numbers is written in a thread.
MAX_INLINE_NUMBERS = 16_384


async def compute_embeddings(
    call: ApiCall,
    generator: TextGenerator,
    inputs: Sequence[EmbeddingInput],
    options: EmbeddingOptions,
    *,
    param: str = "input",
    priority: int = 0,
) -> tuple[Sequence[NDArray[np.float32]], Usage]:
    """Returns the embeddings of inputs, and their usage.

    Args:
        call: The request.
        generator: The model.
        inputs: Texts, or token ids.
        options: Dimensions and truncation.
        param: The field of the inputs, for errors.
        priority: The request's priority.
    """
    if isinstance(generator, EngineGenerator):
        vectors, usage = await generator.embedder.embed(
            inputs,
            options,
            priority=priority,
            param=param,
            patience_s=generator.patience_s,
            trace=call.trace,
            max_tokens=call.service.http_limits.max_embedding_tokens,
        )
    else:
        texts = [one for one in inputs if isinstance(one, str)]
        if len(texts) < len(inputs):
            model = generator.capabilities.model
            raise unsupported(param, f"{model} is behind an API, and accepts only text")
        made = await generator.embed(texts, options)
        vectors, usage = [np.frombuffer(vector, "<f4") for vector in made.vectors], made.usage
    call.record.count(usage)
    return vectors, usage


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
