"""Images from a state to the answer, on the fake model with vision: engine, client and generator."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from support.counted_lines import counted_lines
from support.engine.fake_vision import (
    TEMPLATE,
    TOKENIZER,
    FakeReader,
    answer_alone,
    clip,
    picture,
    prepared,
    prepared_clip,
    vision_runner,
)
from support.engine.stepped_engine import SteppedEngine
from support.fake_engine import FakeEngine
from support.faults import has_param

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.client import EngineClient, running_engine
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.generator.requests import MOST_AT_ONCE
from agentflow.engine.media.known_media import KnownMedia
from agentflow.engine.media_run import PreparedMedium, pseudo_tokens
from agentflow.engine.messages import KeepMedium
from agentflow.engine.request import Submit
from agentflow.engine.runner import OutOfMemory
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeEncoding, FakeRunner
from agentflow.engine.text.state.token_state import medium_mark
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    EngineFailed,
    NotSupported,
    Overloaded,
    PromptTooLong,
)
from agentflow.protocol import ops
from agentflow.protocol.backend import Connection, Deliver, Lost
from agentflow.protocol.chat import Conversation, Message, read_reply
from agentflow.protocol.images import Image, PlacedImage, Video, placed_medium
from agentflow.protocol.op_table import require
from agentflow.protocol.sampling import GenParams, SamplingParams

pytestmark = pytest.mark.anyio

PARAMS = GenParams(max_tokens=5, ignore_eos=True, temperature=0.0)


@asynccontextmanager
async def vision(
    *, runner: FakeRunner | None = None, sees_all: bool = False, **config
) -> AsyncIterator[tuple[EngineGenerator, FakeRunner, EngineClient]]:
    runner = runner or vision_runner()
    opening = running_engine(lambda: (runner, TOKENIZER, SchedulerConfig(**config)))
    async with opening as client:
        reader = FakeReader(sees_all=sees_all)
        yield EngineGenerator(client, TEMPLATE, reader=reader), runner, client
        with anyio.fail_after(10):
            await client.until_idle()
        await client.stats()
        client.engine.scheduler.check_idle()


def ask(generator: EngineGenerator, *parts: str, salt: str = ""):
    """A context with a turn of the user; parts that begin with # are pictures, and parts that begin with @
    are clips, such as ``@dog/8`` for 8 frames."""
    context = generator.open(salt)
    generator.begin_role(context, "user")
    for part in parts:
        if part.startswith("#"):
            generator.image(context, picture(part))
        elif part.startswith("@"):
            generator.video(context, video_of(part))
        else:
            generator.fill(context, part)
    generator.end_role(context)
    generator.begin_role(context, "assistant")
    return context


def video_of(part: str) -> Video:
    name, _, num_frames = part[1:].partition("/")
    return Video(clip(name), int(num_frames) if num_frames else None)


async def answer(generator: EngineGenerator, context) -> tuple[list[int], int]:
    """The generated ids, and the cached tokens of the prompt."""
    found = await generator.generate(context, PARAMS, lambda _: None)
    return context.tokens.ids()[-5:], found.usage.cached_tokens


async def expected(generator: EngineGenerator, context, names: Sequence[str], sees_all: bool = False):
    ids = await generator.requests.prompt_ids(context)
    media = [
        prepared_clip(name[1:].partition("/")[0].encode(), video_of(name).num_frames)
        if name.startswith("@")
        else prepared(name.encode(), sees_all=sees_all)
        for name in dict.fromkeys(names)
    ]
    return answer_alone(ids, media, 5)


@pytest.mark.parametrize("sees_all", [False, True])
@pytest.mark.parametrize("token_budget", [5, 64])
async def test_answers_and_shared_pictures(sees_all: bool, token_budget: int) -> None:
    async with vision(sees_all=sees_all, token_budget=token_budget) as (generator, runner, _):
        first = ask(generator, "Look: ", "#cat", "What?")
        wanted = await expected(generator, first, ["#cat"], sees_all)
        num_prompt = len(first.tokens.ids())
        assert await answer(generator, first) == (wanted, 0)
        second = ask(generator, "Look: ", "#cat", "Why is it there?")
        wanted = await expected(generator, second, ["#cat"], sees_all)
        found, num_cached = await answer(generator, second)
        assert found == wanted
        assert num_cached > num_prompt - 20
        other = ask(generator, "Look: ", "#dog", "What?")
        wanted = await expected(generator, other, ["#dog"], sees_all)
        found, num_cached = await answer(generator, other)
        assert found == wanted
        assert num_cached == other.tokens.ids().index(min(other.tokens.ids(), key=lambda one: one >= 0))
        assert runner.num_encoded == 2


async def test_a_forked_picture_is_read_and_encoded_once() -> None:
    async with vision() as (generator, runner, _):
        context = ask(generator, "#cat", "#cat", "Compare.")
        forks = await generator.fork(context, 4)
        wanted = await expected(generator, context, ["#cat"])
        answers = []

        async def run(fork) -> None:
            answers.append((await answer(generator, fork))[0])

        async with anyio.create_task_group() as group:
            for fork in forks:
                group.start_soon(run, fork)
        assert answers == [wanted] * 4
        assert len(generator.requests.reader.read) == 1
        assert runner.num_encoded == 1


async def test_pictures_in_conversations() -> None:
    async with vision() as (generator, _, _):
        turn = Message("user", "Look. Why?", images=(PlacedImage(5, picture("#cat")),))
        context = generator.open("")
        await generator.converse(context, Conversation((turn,)))
        streamed = ask(generator, "Look.", "#cat", " Why?")
        assert await generator.requests.prompt_ids(context) == await generator.requests.prompt_ids(streamed)
        replied = await generator.reply(context, PARAMS, lambda _: None)
        # The client sends the conversation again: the answer keeps its generated tokens.
        again = generator.open("")
        turns = (turn, Message("assistant", read_reply(replied.text).text), Message("user", "And?"))
        await generator.converse(again, Conversation(turns))
        ids = await generator.requests.prompt_ids(again)
        num_common = len(context.tokens.ids())
        assert ids[:num_common] == context.tokens.ids()
        other = Message("user", "Look. Why?", images=(PlacedImage(5, picture("#dog")),))
        third = generator.open("")
        await generator.converse(third, Conversation((other, *turns[1:])))
        found = await generator.reply(third, PARAMS, lambda _: None)
        assert found.usage.cached_tokens < ids.index(min(ids)) + 1


@pytest.mark.parametrize("token_budget", [5, 64])
async def test_two_questions_on_one_clip(token_budget: int) -> None:
    """The second computes its own tokens. Other numbers of frames, and pictures of the file, are others."""
    async with vision(token_budget=token_budget) as (generator, runner, _):
        first = ask(generator, "Look: ", "@dog/8", "What?")
        wanted = await expected(generator, first, ["@dog/8"])
        assert await answer(generator, first) == (wanted, 0)
        ids = first.tokens.ids()
        clip_end = max(number for number, one in enumerate(ids) if one < 0) + 1
        second = ask(generator, "Look: ", "@dog/8", "Why is it there?")
        wanted = await expected(generator, second, ["@dog/8"])
        found, num_cached = await answer(generator, second)
        assert found == wanted
        assert num_cached >= clip_end
        for other in ("@dog/32", "@dog"):
            context = ask(generator, "Look: ", other, "What?")
            wanted = await expected(generator, context, [other])
            found, num_cached = await answer(generator, context)
            assert found == wanted
            # The ids of the 8 tokens in front of a first frame of two tokens have bits of the clip's hash.
            assert num_cached == next(n for n, one in enumerate(context.tokens.ids()) if one < 0) - 8
        assert runner.num_encoded == 3


async def test_clips_in_conversations_are_told_apart_by_their_frames() -> None:
    async with vision() as (generator, _, _):

        def asking(num_frames: int | None) -> Message:
            return Message("user", "Look. Why?", images=(placed_medium(5, Video(clip("dog"), num_frames)),))

        context = generator.open("")
        await generator.converse(context, Conversation((asking(8),)))
        streamed = ask(generator, "Look.", "@dog/8", " Why?")
        assert await generator.requests.prompt_ids(context) == await generator.requests.prompt_ids(streamed)
        replied = await generator.reply(context, PARAMS, lambda _: None)
        history = (Message("assistant", read_reply(replied.text).text), Message("user", "And?"))
        again = generator.open("")
        await generator.converse(again, Conversation((asking(8), *history)))
        ids = await generator.requests.prompt_ids(again)
        assert ids[: len(context.tokens.ids())] == context.tokens.ids()
        other = generator.open("")
        await generator.converse(other, Conversation((asking(16), *history)))
        found = await generator.reply(other, PARAMS, lambda _: None)
        assert found.usage.cached_tokens < min(n for n, one in enumerate(ids) if one < 0) + 1


async def test_a_broken_clip_fails_alone() -> None:
    async with vision() as (generator, _, client):
        good = ask(generator, "@dog", "#cat", "Compare.")
        wanted = await expected(generator, good, ["@dog", "#cat"])
        with pytest.raises(BadArgument, check=has_param("video")):
            await answer(generator, ask(generator, "@broken"))
        assert (await answer(generator, good))[0] == wanted
        assert generator.capabilities.videos
        assert generator.capabilities.video_frames
        blind = FakeReader()
        blind.video_token = ""
        pictures_only = EngineGenerator(client, TEMPLATE, reader=blind)
        assert not pictures_only.capabilities.videos
        turn = Message("user", "", images=(placed_medium(0, Video(clip("dog"))),))
        for op in (ops.Video(1, clip("dog").source), ops.Converse(1, Conversation((turn,)))):
            with pytest.raises(NotSupported):
                require(op, pictures_only.capabilities)


async def test_a_runner_without_a_tower_reads_no_media() -> None:
    async with vision(runner=vision_runner(reads_media=False)) as (generator, _, _):
        assert not generator.capabilities.images
        assert not generator.capabilities.videos
        for op in (ops.Image(1, picture("cat").source), ops.Video(1, clip("dog").source)):
            with pytest.raises(NotSupported):
                require(op, generator.capabilities)


async def test_choices_and_questions_behind_a_picture() -> None:
    async with vision() as (generator, runner, _):
        context = ask(generator, "#cat", "A cat?")
        scored = await generator.score(context, ["yes", "no"], "token_length_normalized")
        assert scored.usage.prompt_tokens > 12
        assert generator.text(context).endswith(["yes", "no"][scored.index])
        assert runner.num_encoded == 1


async def test_failures_of_pictures() -> None:
    def broken(identity: str, _: int) -> None:
        if identity == prepared(b"#bad").identity:
            raise RuntimeError("the tower fell")

    runner = vision_runner(on_slices=broken)
    async with vision(runner=runner) as (generator, _, client):
        with pytest.raises(EngineFailed):
            await answer(generator, ask(generator, "#bad"))
        good = ask(generator, "#good")
        wanted = await expected(generator, good, ["#good"])
        assert (await answer(generator, good))[0] == wanted
        blind = EngineGenerator(client, TEMPLATE)
        with pytest.raises(NotSupported):
            require(ops.Image(1, picture("cat").source), blind.capabilities)
        context = generator.open("")
        generator.image(context, Image("https://example.org/a.png"))
        with pytest.raises(BadArgument, check=has_param("image")):
            await generator.requests.prompt_ids(context)


async def test_an_encoding_that_cannot_begin() -> None:
    """Without memory it waits for the features of others to go; otherwise its requests fail."""
    runner = vision_runner()
    begin = runner.encode_medium

    def without_memory(medium: PreparedMedium) -> FakeEncoding:
        if medium.identity == prepared(b"#bad").identity:
            raise BadArgument("an image of another model", param="image")
        if runner.encodings:
            raise OutOfMemory("no memory")
        return begin(medium)

    runner.encode_medium = without_memory
    async with vision(runner=runner) as (generator, _, client):
        for name in ("#cat", "#dog"):
            context = ask(generator, name)
            wanted = await expected(generator, context, [name])
            assert (await answer(generator, context))[0] == wanted
        assert [*runner.encodings] == [prepared(b"#dog").identity]
        with pytest.raises(BadArgument, check=has_param("image")):
            await answer(generator, ask(generator, "#bad"))
        stats = await client.stats()
        assert stats.media_encoded == 2


def test_f37_a_failed_encoding_looks_at_the_requests_with_its_image() -> None:
    """The number of other requests does not matter."""
    num_lines = {}
    for num_others in (100, 400):
        engine = SteppedEngine(vision_runner(), None).engine
        for name, numbers in ((b"#bad", range(3)), (b"#good", range(3, num_others))):
            medium = prepared(name)
            engine.send(KeepMedium(medium))
            run = medium.pieces[1].at(medium.identity, 1)
            for number in numbers:
                ids = [7, *pseudo_tokens(run).tolist(), 7]
                engine.send(Submit(number, ids, SamplingParams(max_tokens=1), media=[run.submitted()]))
        while not engine._inbox.empty():
            engine.take_messages()
        with counted_lines() as lines:
            engine._fail_medium(prepared(b"#bad").identity, RuntimeError("the tower fell"))
        num_lines[num_others] = lines.num
        assert engine._requests.keys() == {*range(3, num_others)}
    assert num_lines[400] == num_lines[100]


async def test_f37_a_failed_encoding_fails_no_request_whose_image_is_cached() -> None:
    is_broken, may_end = False, threading.Event()
    may_end.set()

    def encode(identity: str, _: int) -> None:
        if identity == prepared(b"#dog").identity:
            raise OutOfMemory("no memory")
        if is_broken:
            raise RuntimeError("the tower fell")

    runner = vision_runner(on_slices=encode)
    collect = runner.collect

    def collect_in_time(handle: Batch) -> BatchOutput:
        may_end.wait(20)
        return collect(handle)

    runner.collect = collect_in_time
    async with vision(runner=runner, policy="fcfs", max_running=1) as (generator, _, client):
        await answer(generator, ask(generator, "Look: ", "#cat", "What?"))
        with pytest.raises(AgentflowError):
            await answer(generator, ask(generator, "#dog"))
        assert not runner.encodings  # all features were dropped for it
        cached = ask(generator, "Look: ", "#cat", "Why?")
        wanted = await expected(generator, cached, ["#cat"])
        is_broken = True
        may_end.clear()
        found: dict[int, list[int] | None] = {}

        async def run(number: int, context) -> None:
            try:
                found[number] = (await answer(generator, context))[0]
            except EngineFailed:
                found[number] = None

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                needs_features = ask(generator, "Now: ", "#cat")
                contexts = [ask(generator, "1"), needs_features, ask(generator, "2"), cached]
                for number, context in enumerate(contexts):
                    group.start_soon(run, number, context)
                    while len(client._unfinished) <= number:  # they wait in this order
                        await anyio.lowlevel.checkpoint()
                may_end.set()
        assert (found[1], found[3]) == (None, wanted)


async def test_reading_ends_with_the_first_image_that_does_not_fit() -> None:
    async with vision() as (generator, _, _):
        context = ask(generator, *[f"#{number}" for number in range(400)])  # 14 tokens each, 512 fit
        with pytest.raises(PromptTooLong):
            await generator.requests.prompt_ids(context)
        assert 37 <= len(generator.requests.reader.read) < 37 + MOST_AT_ONCE


async def test_few_tasks_read_any_number_of_images() -> None:
    tasks: set[int] = set()

    class Observed(FakeReader):
        async def read_image(self, image: Image, *, tenant: str = "") -> PreparedMedium:
            tasks.add(anyio.get_current_task().id)
            await anyio.lowlevel.checkpoint()
            return await super().read_image(image, tenant=tenant)

    async with vision() as (generator, _, _):
        generator.requests.reader = Observed(num_rows=1)
        await generator.requests.prompt_ids(ask(generator, *[f"#{number}" for number in range(100)]))
        assert len(generator.requests.reader.read) == 100
    assert len(tasks) == MOST_AT_ONCE


async def test_pixels_are_bounded_and_released() -> None:
    async with vision() as (generator, _, client):
        client._media = KnownMedia(7000)  # two pictures
        contexts = [ask(generator, f"#{number}") for number in range(3)]
        await answer(generator, contexts[0])
        await answer(generator, contexts[1])
        with pytest.raises(Overloaded):
            await answer(generator, contexts[2])
        stats = await client.stats()
        assert (stats.media_pixel_bytes, stats.media_encoded) == (6000, 2)
        generator.free(contexts[0])
        del contexts[0]
        await answer(generator, contexts[1])
        stats = await client.stats()
        assert (stats.media_pixel_bytes, stats.media_encoded) == (6000, 3)


def test_f37_nothing_is_kept_of_tenants_without_pictures() -> None:
    """To add one, the bytes of all tenants are counted."""
    known = KnownMedia()
    for number in range(10):
        assert known.add(prepared(b"cat"), f"tenant {number}")[1]
    assert len(known.released()) == 10
    assert not known._bytes_of


async def test_an_aborted_encoding_leaves_nothing() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def stand(*_) -> None:
        reached.set()
        go_on.wait(10)

    runner = vision_runner(on_slices=stand)
    async with vision(runner=runner) as (generator, _, client):
        context = ask(generator, "#cat")
        async with anyio.create_task_group() as group:
            group.start_soon(answer, generator, context)
            await anyio.to_thread.run_sync(reached.wait, 10)
            group.cancel_scope.cancel()
        go_on.set()
        generator.free(context)
        del context
        gc.collect()  # the cancelled call refers to it
        await client.stats()  # the request has ended here, too
        stats = await client.stats()
        assert stats.waiting == stats.running == 0
        assert stats.media_pixel_bytes == 0
        assert not runner.encodings


class VisionEngine(FakeEngine):
    """A backend with vision."""

    def __init__(self, **config) -> None:
        super().__init__(runner=vision_runner(), tokenizer=TOKENIZER, template=TEMPLATE, **config)
        self.reader = FakeReader()

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        async with self.open_client() as client:
            generator = EngineGenerator(client, self.template, reader=self.reader)
            async with interpreted(generator, deliver) as connection:
                yield connection


async def test_programs_fork_over_a_picture() -> None:
    engine = VisionEngine()
    async with af.session(backend=engine) as flow:
        state = flow.state()
        state += af.user("Look: ", af.image(picture("cat").data))
        forks = state.fork(3)
        for number, fork in enumerate(forks):
            fork += af.user(f"Question {number}?")
            fork += af.assistant(af.gen("answer", max_tokens=3, ignore_eos=True))
        answers = [await fork["answer"] for fork in forks]
        assert len(answers) == 3
        hits = [fork["answer"].usage.cached_tokens > 12 for fork in forks]
        assert sum(hits) >= 2  # all but the first that runs
        assert f"Look: {medium_mark(picture('cat'))}" in await state.text()
        assert (len(engine.reader.read), engine.runner.num_encoded) == (1, 1)
        state += af.user(af.video(clip("dog").data, num_frames=4)) + af.assistant(
            af.gen("seen", max_tokens=3, ignore_eos=True)
        )
        await state["seen"]
        assert state["seen"].usage.cached_tokens > 12
        assert medium_mark(video_of("@dog/4")) in await state.text()
        await engine.assert_idle()
