"""Embeddings of texts on an engine: encodes them, checks their size, and runs all of them as requests of one
tenant, which the engine batches by their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.client import EngineClient
from agentflow.engine.request import check_task
from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.engine.submit import Origin
from agentflow.errors import BadArgument, PromptTooLong
from agentflow.protocol.events import Usage
from agentflow.runtime.generator import EmbeddingOptions
from agentflow.runtime.task_group import open_task_group

MAX_AT_ONCE = 256
"""The most unfinished requests of one call. Further ones wait, so that a tenant's part of the queue stays
free."""
MAX_CHARS_PER_TOKEN = 64
"""A text with more characters than this times the model's tokens is rejected before it is encoded."""
_PLAIN = EmbeddingFolder(("lasttoken",), (None,))

EmbeddingInput = str | Sequence[int]


def prefix_of(options: EmbeddingOptions, folder: EmbeddingFolder | None) -> str:
    """Returns the prompt before each text. Raises ``BadArgument`` for a prompt that the model does not
    have."""
    if options.prompt is None:
        return (folder or _PLAIN).prefix(options.prompt_name)
    if options.prompt_name is not None:
        raise BadArgument("give either prompt or prompt_name", param="prompt_name")
    return options.prompt


def check_options(options: EmbeddingOptions, client: EngineClient) -> None:
    """Raises ``BadArgument`` if the model makes no embeddings, or none of this size."""
    check_task(True, client.info)
    size = client.info.embedding_size
    if options.dimensions is not None and not 1 <= options.dimensions <= size:
        raise BadArgument(
            f"dimensions: this model's embeddings have 1 to {size}, not {options.dimensions:,}",
            param="dimensions",
        )


def encoded(
    client: EngineClient,
    inputs: Sequence[EmbeddingInput],
    prefix: str,
    folder: EmbeddingFolder | None,
    param: str,
) -> list[list[int]]:
    """Returns the ids of each input.

    Args:
        client: the engine.
        inputs: texts or token ids.
        prefix: put before each text.
        folder: of the model, for its settings; None: defaults.
        param: the name of the inputs, for errors.

    Raises:
        BadArgument: an input is empty, or has ids outside the vocabulary.
        PromptTooLong: an input is longer than the model accepts.
    """
    most = min(client.info.max_context, client.info.num_slots)
    texts = [prefix + text for text in inputs if isinstance(text, str)]
    for text in texts:
        if len(text) > MAX_CHARS_PER_TOKEN * most:
            raise _too_long(param, f"{len(text):,} characters", most, prefix)
    if (folder or _PLAIN).lowercases:
        texts = [text.lower() for text in texts]
    of_texts = iter(client.tokenizer.encode_whole(texts) if texts else [])
    found = [next(of_texts) if isinstance(one, str) else list(one) for one in inputs]
    for one in found:
        if not one:
            raise BadArgument(f"{param}: an input has no tokens", param=param)
        if len(one) > most:
            raise _too_long(param, f"{len(one):,} tokens", most, prefix)
        if min(one) < 0 or max(one) >= client.info.vocab_size:
            raise BadArgument(
                f"{param}: the ids of this model's tokens are 0 to {client.info.vocab_size - 1}", param=param
            )
    return found


def _too_long(param: str, size: str, most: int, prefix: str) -> PromptTooLong:
    if prefix:
        size += " with its prompt"
    return PromptTooLong(
        f"{param}: an input has {size}; the model takes at most {most:,} tokens: split it", param=param
    )


async def run_embeddings(
    client: EngineClient, ids: Sequence[list[int]], origin: Origin
) -> tuple[list[NDArray[np.float32]], Usage]:
    """Returns the embeddings in the order of ``ids``. Cancellation or a failure aborts all requests."""
    found: dict[int, NDArray[np.float32]] = {}
    usage = Usage()
    # Longest first, so that few requests are left for the last steps.
    order = iter(sorted(range(len(ids)), key=lambda i: -len(ids[i])))

    async def work() -> None:
        nonlocal usage
        for i in order:
            end = await client.embed(ids[i], origin=origin)
            found[i] = np.frombuffer(end.embedding, dtype="<f4")
            usage += Usage(end.prompt_tokens, end.cached_tokens)

    async with open_task_group() as group:
        for _ in range(min(MAX_AT_ONCE, len(ids))):
            group.start_soon(work)
    return [found[i] for i in range(len(ids))], usage


def truncated(embedding: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Returns the first ``dimensions``, scaled to length 1 if the whole embedding has length 1."""
    if dimensions is None or dimensions == len(embedding):
        return embedding
    part = embedding[:dimensions]
    length = float(np.linalg.norm(part))
    is_normalised = abs(float(np.linalg.norm(embedding)) - 1.0) < 0.01
    return part / np.float32(length) if is_normalised and length else part
