"""``POST /v1/embeddings``: the embeddings of texts or token ids, as in OpenAI's API.

Two fields are from sentence-transformers: ``prompt`` is put before each text, and ``prompt_name`` selects one
of the model's prompts.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from agentflow.engine.generator.embedding import EmbeddingInput
from agentflow.engine.request import MAX_PRIORITY
from agentflow.runtime.generator import EmbeddingOptions
from agentflow.server.compatible.embeddings import compute_embeddings, reply_written
from agentflow.server.compatible.fields import Count, TokenId
from agentflow.server.compatible.prompts import IdList, read_prompts
from agentflow.server.completion.request import TokenIds
from agentflow.server.errors import invalid_field
from agentflow.server.http.call import ApiCall

InputText: TypeAlias = Annotated[str, Meta(min_length=1)]
EmbeddingsField: TypeAlias = Annotated[
    InputText | Annotated[list[InputText | TokenId | IdList], Meta(min_length=1)],
    Meta(description="A text, a list of texts, token ids, or a list of lists of token ids."),
]


class EmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Texts to embed. ``dimensions``: the number of first dimensions to keep, for models trained for it.
    ``prompt``: a text before each input. ``prompt_name``: the model's prompt of this name instead."""

    model: str
    input: EmbeddingsField
    dimensions: Count | None = None
    encoding_format: Literal["float", "base64"] | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    user: str | None = None


class EmbeddingObject(msgspec.Struct, kw_only=True):
    """The embedding of one input: a list of numbers, or float32 values (little-endian) in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingsUsage(msgspec.Struct):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(msgspec.Struct, kw_only=True):
    """The embeddings in the order of the inputs."""

    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingsUsage
    object: Literal["list"] = "list"


async def create_embeddings(call: ApiCall) -> None:
    """Makes the embeddings of one input or several."""
    body = await call.process(call.read, EmbeddingsRequest)
    generator = call.embedder(body.model, priority=body.priority)
    inputs = _read_inputs(body.input, call.service.http_limits.max_embedding_inputs)
    options = EmbeddingOptions(body.prompt, body.prompt_name, body.dimensions)
    vectors, usage = await compute_embeddings(call, generator, inputs, options, priority=body.priority or 0)

    def answer() -> EmbeddingsAnswer:
        is_text = body.encoding_format == "base64"
        return EmbeddingsAnswer(
            data=[
                EmbeddingObject(index=index, embedding=_in_base64(vector) if is_text else vector.tolist())
                for index, vector in enumerate(vectors)
            ],
            model=generator.capabilities.model,
            usage=EmbeddingsUsage(usage.prompt_tokens, usage.prompt_tokens),
        )

    await reply_written(call, vectors, answer)


def _read_inputs(given: EmbeddingsField, most: int) -> Sequence[EmbeddingInput]:
    inputs = read_prompts(given, "input")
    if len(inputs) > most:
        raise invalid_field("input", f"{len(inputs):,} inputs exceed the limit of {most:,} for a request")
    return [list(one.ids) if isinstance(one, TokenIds) else one for one in inputs]


def _in_base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
