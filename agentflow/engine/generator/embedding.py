"""Embeddings of texts on an engine: encodes the texts, checks their size, and runs them as requests of one
tenant, which the engine batches by their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.client import EngineClient
from agentflow.engine.generator.requests import TenantRequests
from agentflow.engine.request import Origin
from agentflow.engine.store.embedding_folder import EmbeddingFolder
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


class EngineEmbedder:
    """The embedding requests of one tenant. ``folder``: the model's settings, such as its prompts."""

    def __init__(self, requests: TenantRequests, folder: EmbeddingFolder | None) -> None:
        self._requests = requests
        self._client = requests.client
        self._folder = folder or _PLAIN

    async def embed(
        self,
        inputs: Sequence[EmbeddingInput],
        options: EmbeddingOptions,
        *,
        param: str = "input",
        priority: int = 0,
        patience_s: float | None = None,
        trace: str = "",
        max_tokens: int | None = None,
    ) -> tuple[list[NDArray[np.float32]], Usage]:
        """Returns the embeddings of texts and of token ids, as one request of the tenant.

        Args:
            inputs: texts or token ids.
            options: the prompt and the dimensions.
            param: the caller's name of the inputs, for errors.
            priority: as for ``EngineGenerator.open``.
            patience_s: as for ``EngineGenerator.open``.
            trace: as for ``EngineGenerator.open``.
            max_tokens: the limit of all inputs together.

        Raises:
            BadArgument: an input or an option is invalid.
            PromptTooLong: an input, or all together, are too long.
        """
        requests, tenant = self._requests, self._requests.tenant
        _check_options(options, self._client)
        prefix = self._prefix(options)
        amount = sum(map(len, inputs)) + len(prefix) * len(inputs)
        async with requests.admitted(num_chars=amount) as admitted:
            ids = await requests.run_off_loop(amount, self._encoded, inputs, prefix, param)
            num_tokens = sum(map(len, ids))
            if max_tokens is not None and num_tokens > max_tokens:
                raise PromptTooLong(
                    f"{param}: the inputs have {num_tokens:,} tokens together; this server takes at most "
                    f"{max_tokens:,} in one request: send fewer",
                    param=param,
                )
            requests.begin(admitted, num_tokens)
            origin = Origin(
                tenant.name,
                weight=tenant.weight,
                objective="throughput" if len(ids) > 1 else "latency",
                priority=priority,
                patience_s=patience_s,
                trace=trace,
                label="embed",
            )
            vectors, usage = await _run(self._client, ids, origin)
            requests.done(admitted, usage)
        return [_truncated(vector, options.dimensions) for vector in vectors], usage

    def _prefix(self, options: EmbeddingOptions) -> str:
        """Returns the prompt before each text. Raises ``BadArgument`` for a prompt that the model does not
        have."""
        if options.prompt is None:
            return self._folder.prefix(options.prompt_name)
        if options.prompt_name is not None:
            raise BadArgument("give either prompt or prompt_name", param="prompt_name")
        return options.prompt

    def _encoded(self, inputs: Sequence[EmbeddingInput], prefix: str, param: str) -> list[list[int]]:
        """Returns the ids of each input, with ``prefix`` before each text."""
        info = self._client.info
        most = min(info.max_context, info.num_slots)
        texts = [prefix + text for text in inputs if isinstance(text, str)]
        for text in texts:
            if len(text) > MAX_CHARS_PER_TOKEN * most:
                raise _too_long(param, f"{len(text):,} characters", most, prefix)
        if self._folder.lowercases:
            texts = [text.lower() for text in texts]
        of_texts = iter(self._client.tokenizer.encode_whole(texts) if texts else [])
        found = [next(of_texts) if isinstance(one, str) else list(one) for one in inputs]
        for one in found:
            if not one:
                raise BadArgument(f"{param}: an input has no tokens", param=param)
            if len(one) > most:
                raise _too_long(param, f"{len(one):,} tokens", most, prefix)
            if min(one) < 0 or max(one) >= info.vocab_size:
                raise BadArgument(
                    f"{param}: the ids of this model's tokens are 0 to {info.vocab_size - 1}", param=param
                )
        return found


def _check_options(options: EmbeddingOptions, client: EngineClient) -> None:
    """Raises ``BadArgument`` if the model makes no embeddings of this size."""
    size = client.info.embedding_size
    if options.dimensions is not None and not 1 <= options.dimensions <= size:
        raise BadArgument(
            f"dimensions: this model's embeddings have 1 to {size}, not {options.dimensions:,}",
            param="dimensions",
        )


def _too_long(param: str, size: str, most: int, prefix: str) -> PromptTooLong:
    if prefix:
        size += " with its prompt"
    return PromptTooLong(
        f"{param}: an input has {size}; the model takes at most {most:,} tokens: split it", param=param
    )


async def _run(
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


def _truncated(embedding: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Returns the first ``dimensions``, scaled to length 1 if the whole embedding has length 1."""
    if dimensions is None or dimensions == len(embedding):
        return embedding
    part = embedding[:dimensions]
    length = float(np.linalg.norm(part))
    is_normalised = abs(float(np.linalg.norm(embedding)) - 1.0) < 0.01
    return part / np.float32(length) if is_normalised and length else part
