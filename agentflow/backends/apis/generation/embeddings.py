"""Embeddings by ``POST /embeddings`` of OpenAI's API and its relatives."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from agentflow.backends.apis.answers.answer import CHARS_PER_TOKEN
from agentflow.backends.apis.answers.reported_usage import read_count
from agentflow.backends.apis.capability_table import EmbeddingFacts
from agentflow.backends.apis.generation.posted_calls import post_charged
from agentflow.backends.apis.http.transport import ApiTransport
from agentflow.backends.apis.prices import FREE, Billing
from agentflow.errors import BadArgument, NotSupported, ProtocolError
from agentflow.protocol.events import Usage
from agentflow.runtime.generator import EmbeddingOptions, Embeddings

MAX_REQUEST_BYTES: Final = 250_000
"""The bytes of all texts of a request: OpenAI accepts 300,000 tokens, and a token has at least a byte."""


class _One(msgspec.Struct):
    embedding: list[float] | str
    index: int | None = None


class _Answer(msgspec.Struct):
    data: list[_One]
    usage: Any = None


class ApiEmbedder:
    """Makes embeddings with a model behind an API.

    Args:
        transport: Sends the requests.
        model: The model's name.
        facts: Its limits.
        billing: The costs of the calls.

    Attributes:
        total: The usage of all calls.
    """

    def __init__(
        self, transport: ApiTransport, model: str, facts: EmbeddingFacts, billing: Billing = FREE
    ) -> None:
        self.model = model
        self.total = Usage()
        self._transport = transport
        self._facts = facts
        self._billing = billing

    async def embed(self, texts: Sequence[str], options: EmbeddingOptions) -> Embeddings:
        """The embeddings of texts, by as many requests as the limits of the API need.

        Raises:
            NotSupported: The model has no named prompts, or does not shorten its embeddings.
            BadArgument: There are more ``dimensions`` than the model has.
        """
        self._check(options)
        vectors: list[bytes] = []
        usage = Usage()
        for part in self._parts([(options.prompt or "") + text for text in texts]):
            made = await self._embed(part, options.dimensions)
            vectors += made.vectors
            usage += made.usage
        return Embeddings(vectors, usage)

    def _check(self, options: EmbeddingOptions) -> None:
        if options.prompt_name is not None:
            raise NotSupported(
                f"{self.model} is behind an API that has no named prompts: give prompt=", param="prompt_name"
            )
        if options.dimensions is None:
            return
        if not self._facts.shortens:
            raise NotSupported(
                f"{self.model} does not shorten its embeddings: leave out dimensions", param="dimensions"
            )
        most = self._facts.dimensions
        if most is not None and options.dimensions > most:
            raise BadArgument(
                f"{self.model} has {most:,} dimensions, not {options.dimensions:,}", param="dimensions"
            )

    def _parts(self, texts: Sequence[str]) -> Iterator[list[str]]:
        part: list[str] = []
        num_bytes = 0
        for text in texts:
            size = len(text.encode())
            if part and (len(part) == self._facts.max_inputs or num_bytes + size > MAX_REQUEST_BYTES):
                yield part
                part, num_bytes = [], 0
            part.append(text)
            num_bytes += size
        if part:
            yield part

    async def _embed(self, texts: list[str], dimensions: int | None) -> Embeddings:
        fields: dict[str, Any] = {
            "model": self.model,
            "input": texts,
            "encoding_format": self._facts.encoding,
        }
        if dimensions is not None:
            fields["dimensions"] = dimensions
        body = msgspec.json.encode(fields)

        def read(found: Any) -> tuple[_Answer, Usage]:
            try:
                answer = msgspec.convert(found, _Answer)
            except msgspec.ValidationError as error:
                raise self._wrong(str(error)) from error
            counted = read_count(answer.usage, "prompt_tokens", "total_tokens")
            if counted is None:  # a server that counts nothing must not make a cap useless
                counted = len(body) // CHARS_PER_TOKEN
            return answer, Usage(prompt_tokens=counted)

        answer, usage = await post_charged(
            self._transport, self._billing, "embeddings", body, read, self._count
        )
        return Embeddings(self._vectors(answer, len(texts), dimensions), usage)

    def _count(self, usage: Usage) -> None:
        self.total += usage

    def _vectors(self, answer: _Answer, count: int, dimensions: int | None) -> list[bytes]:
        rows = sorted(
            [
                (number if one.index is None else one.index, one.embedding)
                for number, one in enumerate(answer.data)
            ]
        )
        if [index for index, _ in rows] != list(range(count)):
            raise self._wrong(f"{len(rows)} embeddings for {count} texts")
        vectors = [self._packed(embedding) for _, embedding in rows]
        sizes = {len(vector) // 4 for vector in vectors}
        if dimensions is not None and sizes != {dimensions}:
            raise NotSupported(
                f"{self._transport.errors.server} ignores dimensions for {self.model}: leave it out",
                param="dimensions",
            )
        if len(sizes) != 1 or 0 in sizes:
            raise self._wrong("embeddings of different sizes")
        return vectors

    def _packed(self, embedding: list[float] | str) -> bytes:
        try:
            if isinstance(embedding, list):
                return struct.pack(f"<{len(embedding)}f", *embedding)
            packed = base64.b64decode(embedding, validate=True)
        except (ValueError, OverflowError) as error:
            raise self._wrong(str(error)) from error
        if len(packed) % 4:
            raise self._wrong("an embedding that is not float32")
        return packed

    def _wrong(self, why: str) -> ProtocolError:
        return ProtocolError(f"{self._transport.errors.server} answered with wrong embeddings: {why}")
