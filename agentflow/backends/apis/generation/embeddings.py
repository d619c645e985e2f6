"""Embeddings by ``POST /embeddings`` of OpenAI's API and its relatives."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

import anyio
import msgspec

from agentflow.backends.apis.answers.answer import CHARS_PER_TOKEN
from agentflow.backends.apis.answers.reported_usage import read_count
from agentflow.backends.apis.capability_table import EmbeddingFacts
from agentflow.backends.apis.http.rate_limits import Demand
from agentflow.backends.apis.http.transport import ApiTransport
from agentflow.backends.apis.prices import FREE, Billing
from agentflow.errors import AgentflowError, BadArgument, NotSupported, ProtocolError, ServerLost
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
    """

    def __init__(
        self, transport: ApiTransport, model: str, facts: EmbeddingFacts, billing: Billing = FREE
    ) -> None:
        self.model = model
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
        await self._billing.until_ready(len(body), 0)
        with self._billing.charged(len(body), 0) as charged:
            try:
                found = await self._transport.post("embeddings", body, demand=Demand(len(body)))
                answer = self._answer(found)
            except (ProtocolError, ServerLost, anyio.get_cancelled_exc_class()):  # it may have been computed
                charged(Usage(len(body) // CHARS_PER_TOKEN))
                raise
            except AgentflowError:
                charged(Usage())
                raise
            counted = read_count(answer.usage, "prompt_tokens", "total_tokens")
            if counted is None:  # a server that counts nothing must not make a cap useless
                counted = len(body) // CHARS_PER_TOKEN
            usage = charged(Usage(prompt_tokens=counted))
        return Embeddings(self._vectors(answer, len(texts), dimensions), usage)

    def _answer(self, found: Any) -> _Answer:
        try:
            return msgspec.convert(found, _Answer)
        except msgspec.ValidationError as error:
            raise self._wrong(str(error)) from error

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
