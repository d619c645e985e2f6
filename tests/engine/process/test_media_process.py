"""Images in an engine process: they cross in parts, once, and come back after a restart."""

from __future__ import annotations

import gc
import itertools
import logging
import signal

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from support.engine.fake_vision import (
    TEMPLATE,
    TOKENIZER,
    FakeReader,
    answer_alone,
    picture,
    prepared,
    vision_runner,
)
from support.holds import Hold, stand, until
from support.processes import signal_child

from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.machine.child_process import to_frame
from agentflow.engine.media_run import MediaPiece, PreparedMedium
from agentflow.engine.messages import Abort, DropMedium, Start, ToEngine, to_engine_decoder
from agentflow.engine.process.connection import ProcessConnection
from agentflow.engine.process.deadlines import Deadlines
from agentflow.engine.process.medium_parts import PART_BYTES, MediumAssembly, medium_parts
from agentflow.engine.process.supervisor import supervised_engine
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.sampling import GenParams

pytestmark = pytest.mark.anyio
PARAMS = GenParams(max_tokens=6, ignore_eos=True, temperature=0.0)


def load(*, hold: str, hold_slices: str) -> tuple[FakeRunner, Tokenizer, SchedulerConfig]:
    """Runs in the process. ``hold``: before the fourth step; ``hold_slices``: before slices."""
    steps = itertools.count(1)
    runner = vision_runner(
        on_step=lambda _: stand(hold if next(steps) == 4 else ""),
        on_slices=lambda *_: stand(hold_slices),
    )
    return runner, TOKENIZER, SchedulerConfig()


@pytest.mark.parametrize("where", ["decoding", "encoding"])
async def test_a_request_with_pictures_survives_the_process(tmp_path, where) -> None:
    hold = Hold(tmp_path / "hold")
    options = {"hold": "", "hold_slices": ""} | {
        {"decoding": "hold", "encoding": "hold_slices"}[where]: hold.path
    }
    start = Start(f"{__name__}:{load.__name__}", options, logging.WARNING)
    async with supervised_engine(start, lambda: TOKENIZER) as client:
        generator = EngineGenerator(client, TEMPLATE, reader=FakeReader(num_bytes=3 * PART_BYTES))
        context = generator.open("")
        generator.begin_role(context, "user")
        generator.image(context, picture("cat"))
        generator.image(context, picture("dog"))
        generator.end_role(context)
        generator.begin_role(context, "assistant")
        ids = await generator.requests.prompt_ids(context)
        media = [prepared(name, num_bytes=3 * PART_BYTES) for name in (b"cat", b"dog")]
        async with anyio.create_task_group() as group:
            group.start_soon(generator.generate, context, PARAMS, lambda _: None)
            await hold.reached()
            signal_child(client.engine.pid, signal.SIGKILL)
            hold.release()
        assert client.engine.restarts == 1
        assert context.tokens.ids()[len(ids) :] == answer_alone(ids, media, 6)
        stats = await client.stats()
        assert (stats.media_encoded, stats.media_pixel_bytes) == (2, 6 * PART_BYTES)
        generator.free(context)
        del context
        gc.collect()
        stats = await client.stats()
        assert stats.media_pixel_bytes == 0
        assert not client.engine._media


@pytest.mark.parametrize("is_read_again", [False, True])
async def test_f37_a_client_may_cancel_while_its_picture_is_sent(is_read_again: bool) -> None:
    """The process gets other pictures and requests as before, or the same picture for another request."""
    start = Start(f"{__name__}:{load.__name__}", {"hold": "", "hold_slices": ""}, logging.WARNING)
    num_bytes = 100 * PART_BYTES
    async with supervised_engine(start, lambda: TOKENIZER) as client:
        generator = EngineGenerator(client, TEMPLATE, reader=FakeReader(num_bytes=num_bytes))

        async def ask(name: str) -> None:
            context = generator.open("")
            generator.image(context, picture(name))
            ids = await generator.requests.prompt_ids(context)
            try:
                await generator.generate(context, PARAMS, lambda _: None)
            finally:
                generator.free(context)
            medium = prepared(name.encode(), num_bytes=num_bytes)
            assert context.tokens.ids()[len(ids) :] == answer_alone(ids, [medium], 6)

        async with anyio.create_task_group() as group:
            group.start_soon(ask, "cat")
            await until(lambda: client.engine.num_unfinished == 1)
            assert not client.engine._journal.media
            group.cancel_scope.cancel()
        assert client.engine.num_unfinished == 0
        gc.collect()
        if not is_read_again:
            await client.stats()
            assert not client.engine._media
        await ask("cat" if is_read_again else "dog")
        gc.collect()
        stats = await client.stats()
        assert stats.media_pixel_bytes == 0
        assert not client.engine._media
        assert client.engine.restarts == 0


class RecordingChild:
    """A process that keeps the messages sent to it, and answers none."""

    pid, node = None, ""

    def __init__(self) -> None:
        self.messages: list[ToEngine] = []

    async def send(self, frame: bytes) -> None:
        """Keeps a message."""
        self.messages.append(to_engine_decoder.decode(frame[4:]))
        await anyio.lowlevel.checkpoint()

    async def receive(self) -> list[bytes]:
        """Waits."""
        await anyio.sleep_forever()
        raise AssertionError

    async def end(self, grace_s: float = 0.0) -> str:
        """Has nothing to end."""
        return "ended"


@pytest.mark.parametrize("num_before", [0, 2, 20])
async def test_f37_an_image_that_is_dropped_and_sent_again_is_there(num_before: int) -> None:
    child = RecordingChild()
    medium = prepared(b"cat", num_bytes=3 * PART_BYTES)
    with ProcessConnection(child, Deadlines(), lambda: False) as connection:
        for number in range(num_before):
            connection.post(Abort(number))
        connection.drop_medium(medium.identity)
        connection.send_medium(medium)
        sent: list[str] = []

        def on_medium(identity: str) -> None:
            sent.append(identity)
            connection.post(Abort(-1))

        async with anyio.create_task_group() as group:
            group.start_soon(connection.run, lambda messages: None, on_medium)
            await until(lambda: Abort(-1) in child.messages)
            connection.close()
    of_medium = [message for message in child.messages if not isinstance(message, Abort)]
    assert of_medium[0] == DropMedium(medium.identity)
    assert len(of_medium) == 1 + len(list(medium_parts(medium)))
    assert sent == [medium.identity]


def test_parts_give_the_same_medium() -> None:
    arrays = {
        "pixels": np.arange(2 * PART_BYTES + 6, dtype=np.uint8).reshape(2, -1),
        "mask": np.zeros((2, 0), dtype=np.uint8),
        "grid": np.array([[1, 2, 3]]),
        "flipped": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    }
    piece = MediaPiece(np.array([[0, 1], [2, 3]]), first=5, sees_all=True)
    medium = PreparedMedium("cat", arrays, ("<row>", piece))
    assembly = MediumAssembly()
    parts = [to_engine_decoder.decode(to_frame(part)[4:]) for part in medium_parts(medium)]
    *before, last = [assembly.push(part) for part in parts]
    assert before == [None] * len(before)
    assert max(len(part.data) for part in parts) <= PART_BYTES
    assert (last.identity, last.pieces[0]) == ("cat", "<row>")
    for name, array in arrays.items():
        assert last.arrays[name].dtype == array.dtype
        assert np.array_equal(last.arrays[name], array)
    assert np.array_equal(last.pieces[1].positions, piece.positions)
    assert (last.pieces[1].first, last.pieces[1].sees_all) == (5, True)
