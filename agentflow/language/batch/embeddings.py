"""Embeddings of many texts: ``flow.embed`` splits them into ops of bounded size. A few of these run
concurrently, each in a branch of one run. Closing a branch frees the memory of its embeddings in the
backend."""

from __future__ import annotations

import base64
import json
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeAlias

import anyio
import msgspec

from agentflow.errors import BadArgument
from agentflow.language.batch.map import ShowTally, Tally
from agentflow.language.link import Link
from agentflow.language.markers import MARKERS
from agentflow.language.program import execute
from agentflow.language.states.recorder import Recorder
from agentflow.language.states.run import Run, StateNode
from agentflow.language.states.state import State
from agentflow.language.typed.values import ValueType
from agentflow.protocol import ops
from agentflow.runtime.task_group import open_task_group

Vector: TypeAlias = list[float]

CONCURRENCY: Final = 4
"""The number of ops of one call that run concurrently, so that the engine always has work."""


async def embed_texts(
    link: Link, texts: Sequence[str], wanted: ops.Embed, show: ShowTally | None
) -> list[Vector]:
    """The embeddings of ``texts``, in their order. ``wanted``: the options. Cancelling it, or a failure,
    cancels all of its ops."""
    model, embed_model = _embedder(link, wanted.model)
    wanted = msgspec.structs.replace(wanted, model=embed_model)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise BadArgument(
                f"embed: text {number} is {text!r:.200}, not a string (await a variable first)", param="texts"
            )
        if not text:
            raise BadArgument(f"embed: text {number} is empty: leave it out", param="texts")
    MARKERS.reject(texts, "embed: a text", "texts")
    if not texts:
        return []
    batches = list(_batches(texts, len(wanted.prompt or "")))
    found: list[list[Vector]] = [[] for _ in batches]
    run = Run(link, model=model, name="embed")
    tally = Tally(len(texts), name="embed", usage=run.record.usage)
    display: AbstractContextManager[Callable[[], None]] = nullcontext(lambda: None)
    if show is not None:
        display = show(tally)

    async def embed(branch: StateNode, index: int) -> None:
        link.check_alive()
        recorder = Recorder(branch)
        variable = recorder.embed(batches[index], wanted, VECTORS)
        recorder.submit()
        found[index] = await variable
        if branch is not run.root:
            run.drop(branch)
        tally.num_done += len(batches[index])
        tally.usage = run.record.usage
        refresh()

    async def program(state: State) -> None:
        if len(batches) == 1:
            await embed(run.root, 0)
            return
        room = anyio.Semaphore(CONCURRENCY)
        failures: list[Exception] = []

        async def work(branch: StateNode, index: int) -> None:
            try:
                await embed(branch, index)
            except Exception as error:  # if the session ends, all fail: the first is raised
                failures.append(error)
                group.cancel_scope.cancel()
            room.release()

        async with open_task_group() as group:
            for index in range(len(batches)):
                await room.acquire()
                group.start_soon(work, run.root.fork(1)[0], index)
        if failures:
            raise failures[0]

    with display as refresh:
        await execute(run, program, (), {})
    return [vector for vectors in found for vector in vectors]


def _embedder(link: Link, name: str) -> tuple[str, str]:
    """The model of the session that makes embeddings, and its embedding model. ``name``: of either; empty for
    the first. Raises the errors of ``Capabilities.require_embeddings``."""
    models = link.models
    found = {
        model: features.embedding_models for model, features in models.items() if features.embedding_models
    }
    if name in found and models[name].model in found[name] and name not in found[name]:
        return name, models[name].model
    for model, embed_models in found.items():
        if not name or name in embed_models:
            return "" if model == next(iter(models)) else model, name or embed_models[0]
    known = dict.fromkeys(one for embed_models in found.values() for one in embed_models)
    features = msgspec.structs.replace(link.capabilities, embedding_models=tuple(known))
    features.require_embeddings(name)
    raise AssertionError


def _batches(texts: Sequence[str], prompt_chars: int) -> Iterator[list[str]]:
    """Splits the texts into batches for one op each, as large as an op may be."""
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        amount = len(text) + prompt_chars
        if batch and (len(batch) == ops.MAX_EMBED_TEXTS or num_chars + amount > ops.MAX_EMBED_CHARS):
            yield batch
            batch, num_chars = [], 0
        batch.append(text)
        num_chars += amount
    yield batch


def _read(text: str) -> list[Vector]:
    return [_vector(one) for one in json.loads(text)]


def _vector(encoded: str) -> Vector:
    values = array("f", base64.b64decode(encoded, validate=True))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


VECTORS: Final = ValueType("list of embeddings", None, _read)
