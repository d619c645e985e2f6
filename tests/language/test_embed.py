"""``flow.embed``: the embeddings of texts in bounded ops, in order, recorded, cancelled and limited."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param
from support.observed_backends import Observed, Unbatched

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.backends.scripted_generator import EMBEDDING_SIZE, ScriptedGenerator
from agentflow.language.batch.embeddings import CONCURRENCY, _batches
from agentflow.protocol import ops
from agentflow.protocol.events import Capabilities
from agentflow.protocol.op_table import op_spec
from agentflow.runtime.generator import EmbeddingOptions, Embeddings
from agentflow.runtime.word_embedding import word_embedding

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


def expected(text: str, size: int = EMBEDDING_SIZE) -> list[float]:
    """The embedding in float32, as a backend has it."""
    words = [word.encode() for word in re.findall(r"\w+", text.lower())]
    return array("f", word_embedding(words, size)).tolist()


class Waiting:
    """Embeds when it is allowed to, and counts the calls in progress."""

    def __init__(self, fails_at: str = "") -> None:
        self.generator = ScriptedGenerator("")
        self.allowed = anyio.Event()
        self.begun = anyio.Semaphore(0)
        self.now = self.most = 0
        self._embed, self._fails_at = self.generator.embed, fails_at
        self.generator.embed = self.embed

    async def embed(self, texts: Sequence[str], options: EmbeddingOptions) -> Embeddings:
        self.now += 1
        self.most = max(self.most, self.now)
        self.begun.release()
        try:
            if self._fails_at in texts:
                raise af.PromptTooLong("it is too long", param="texts")
            await self.allowed.wait()
            return await self._embed(texts, options)
        finally:
            self.now -= 1

    def connect(self, deliver, lost):
        return interpreted(self.generator, deliver)


@pytest.mark.parametrize("unbatched", [False, True])
async def test_texts_become_vectors_in_their_order(unbatched):
    backend = af.Scripted("")
    texts = [f"text {number} of {'bees' if number % 3 else 'trees'}" for number in range(700)]
    async with af.session(backend=Unbatched(backend) if unbatched else backend) as flow:
        assert await flow.embed(texts) == [expected(text) for text in texts]
        assert await flow.embed(text for text in texts[:2]) == [expected(text) for text in texts[:2]]
        assert await flow.embed(texts[0]) == expected(texts[0])
        assert await flow.embed(texts[0], dimensions=5, model="scripted") == expected(texts[0], 5)
        assert await flow.embed([]) == []
        assert flow.runs[0].usage.prompt_tokens == 4 * len(texts)
    assert backend.generator.num_open == 0


LENGTHS = st.lists(st.sampled_from([1, 7, 700, 1500, ops.MAX_EMBED_CHARS, 2 * ops.MAX_EMBED_CHARS]))


@given(lengths=LENGTHS, count=st.integers(1, 700), prompt_chars=st.integers(0, 2000))
def test_an_op_has_as_many_texts_as_it_may(lengths, count, prompt_chars):
    texts = ["x" * length for length in lengths] + ["y"] * count
    prompt = "p" * prompt_chars

    def is_allowed(batch: list[str]) -> bool:
        op = ops.Embed(1, 2, "embed()", tuple(batch), prompt=prompt)
        try:
            op_spec(op).check(op)
        except af.errors.BadArgument:
            return False
        return True

    batches = list(_batches(texts, prompt_chars))
    assert [text for batch in batches for text in batch] == texts
    assert all(map(is_allowed, batches))
    for batch, following in pairwise(batches):
        assert not is_allowed([*batch, following[0]])


async def test_few_ops_run_at_once_and_their_embeddings_are_freed():
    backend = Waiting()
    observed = Observed(backend)
    texts = ["x" * ops.MAX_EMBED_CHARS] * (3 * CONCURRENCY)
    async with af.session(backend=observed) as flow, anyio.create_task_group() as group:

        async def run() -> None:
            assert len(await flow.embed(texts)) == len(texts)

        group.start_soon(run)
        for _ in range(CONCURRENCY):
            await backend.begun.acquire()
        assert len(observed.of(ops.Embed)) == CONCURRENCY
        backend.allowed.set()
    assert (backend.now, backend.most) == (0, CONCURRENCY)
    assert len(observed.of(ops.Close)) == len(texts) + 1
    embedded = [index for index, op in enumerate(observed.ops) if isinstance(op, ops.Embed)]
    closed = [index for index, op in enumerate(observed.ops) if isinstance(op, ops.Close)]
    for number, at in enumerate(embedded[CONCURRENCY:], 1):  # each takes the place of one that is closed
        assert sum(index < at for index in closed) >= number


async def test_cancelling_the_call_ends_its_work():
    backend = Waiting()
    async with af.session(backend=backend) as flow:
        async with anyio.create_task_group() as group:
            group.start_soon(flow.embed, ["a"] * 2000)
            for _ in range(CONCURRENCY):
                await backend.begun.acquire()
            group.cancel_scope.cancel()
        backend.allowed.set()
        assert await flow.embed("a b") == expected("a b")
    assert (backend.now, backend.generator.num_open) == (0, 0)


async def test_a_failure_ends_the_rest_and_not_the_session():
    backend = Waiting(fails_at="bad")
    async with af.session(backend=backend) as flow:
        with pytest.raises(af.PromptTooLong, check=has_param("texts")):
            await flow.embed(["a"] * 600 + ["bad"] + ["a"] * 900)
        backend.allowed.set()
        assert await flow.embed("a b") == expected("a b")
        assert backend.now == 0
        assert [run.error for run in flow.runs] == ["prompt_too_long", ""]


async def test_limits_of_the_session_apply():
    async with af.session(backend=af.Scripted("")) as flow:
        flow.limit(deadline_s=0)
        for texts in ("a", ["a"] * 2000):
            with pytest.raises(af.DeadlineExceeded):
                await flow.embed(texts)
    backend = Waiting()
    async with af.session(backend=backend) as flow:
        flow.limit(deadline_s=0.01)
        with pytest.raises(af.DeadlineExceeded):
            await flow.embed("a")
        assert backend.now == 0


async def test_a_recording_replays_them(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    texts = [f"text {number}" for number in range(600)]
    async with af.session(backend=af.Scripted(""), record=path) as flow:
        first = await flow.embed(texts)
        one = await flow.embed("a b", prompt="c")
    async with af.session(backend=af.Replay(path)) as flow:
        assert (await flow.embed(texts), await flow.embed("a b", prompt="c")) == (first, one)
    async with af.session(backend=af.Replay(path)) as flow:
        with pytest.raises(af.errors.ReplayDiffers, match="another"):
            await flow.embed([*texts[:-1], "another"])


@pytest.mark.parametrize(
    ("texts", "options", "param"),
    [
        ([""], {}, "texts"),
        (["a", ""], {}, "texts"),
        (None, {}, "texts"),
        (["a"] * 600 + [""], {}, "texts"),
        ([3], {}, "texts"),
        ([["a"]], {}, "texts"),
        (["a"], {"dimensions": 0}, "dimensions"),
        (["a"], {"dimensions": 65}, "dimensions"),
        (["a"], {"prompt": "x", "prompt_name": "query"}, "prompt_name"),
    ],
)
async def test_wrong_arguments_are_named(texts, options, param):
    async with af.session(backend=af.Scripted("")) as flow:
        with pytest.raises(af.errors.BadArgument, check=has_param(param)):
            await flow.embed(texts, **options)


async def test_a_variable_must_be_awaited_first():
    async with af.session(backend=af.Scripted("a")) as flow, flow.state() as s:
        s += "p" + af.gen("x")
        with pytest.raises(af.errors.BadArgument):
            await flow.embed([f"about {s['x']}"])
        assert await flow.embed(await s["x"]) == expected("a")


async def test_a_model_that_makes_none_is_not_asked():
    backend = af.Scripted("")
    backend.generator.capabilities = Capabilities("plain")
    observed = Observed(backend)
    async with af.session(backend=observed) as flow:
        for texts in ([], "a"):
            with pytest.raises(af.errors.NotSupported, match="embed_model"):
                await flow.embed(texts)
        assert observed.ops == []
    async with af.session(backend=af.Scripted("")) as flow:
        with pytest.raises(af.errors.UnknownModel, match="scripted", check=has_param("model")):
            await flow.embed("a", model="other")


async def test_a_backend_that_is_given_has_its_own_models():
    with pytest.raises(af.errors.BadArgument):
        af.session(backend=af.Scripted(""), embed_model="minilm")
    with pytest.raises(af.errors.BadArgument):
        af.session(embed_model=3)  # type: ignore[arg-type]
