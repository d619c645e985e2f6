"""Calls as requests of a batch: the ``ApiFormat`` of a map in batches."""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec

from agentflow.backends.apis.answers.answer import AnswerCollector
from agentflow.backends.apis.batches.batch_api import BatchApi
from agentflow.backends.apis.generation.api_format import ApiFormat, ApiRequest, Call
from agentflow.backends.apis.generation.conversation import ApiContext
from agentflow.backends.apis.http.event_stream import EventSink
from agentflow.backends.apis.http.file_slots import filled_size, without_nonce
from agentflow.errors import BadArgument

_STREAMED = ("stream", "stream_options")
_SEED = "seed"
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BatchedFormat:
    """Writes the requests of ``inner`` as lines of a batch. The path of a request ends in its key, after a
    ``#``.

    The key is the same when an interrupted program runs again: a digest of the state's label and of the
    request, without its seed, which may differ then. Equal requests of one label are numbered. They are
    interchangeable: the collector chooses the id in the batch.
    """

    def __init__(self, inner: ApiFormat, api: BatchApi) -> None:
        self._inner = inner
        self.min_tokens = inner.min_tokens
        self.may_stop_reasoning = inner.may_stop_reasoning
        self._api = api
        self._counts: Counter[str] = Counter()

    def request(self, context: ApiContext, call: Call) -> ApiRequest:
        """The request for a call. ``NotSupported`` if the API cannot express it."""
        request = self._inner.request(context, call)
        fields = {
            name: value for name, value in _fields.decode(request.body).items() if name not in _STREAMED
        }
        digest = hashlib.blake2b(digest_size=16)
        unseeded = {name: value for name, value in fields.items() if name != _SEED}
        written = without_nonce(msgspec.json.encode(unseeded))
        for part in (context.label.encode(), request.path.encode(), written):
            digest.update(len(part).to_bytes(8, "big") + part)
        identity = digest.hexdigest()
        self._counts[identity] += 1
        key = f"{identity}-{self._counts[identity]}"
        body = self._api.line(key, request.path, fields)
        if (size := filled_size(body)) > self._api.max_bytes:
            raise BadArgument(
                f"a request of {size:,} bytes does not fit into a batch, which has at most "
                f"{self._api.max_bytes:,}: show fewer or smaller images"
            )
        # No request waits for another one's prefix: all of a stage run in one batch.
        return request._replace(path=f"{request.path}#{key}", body=body, gate=None)

    def sink(self, request: ApiRequest, answer: AnswerCollector) -> EventSink:
        """The reader of an answer."""
        return self._inner.sink(request._replace(path=request.path.partition("#")[0]), answer)
