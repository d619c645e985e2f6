"""Images of a program: the accepted arguments, and the ops that reach the backend."""

from __future__ import annotations

import gc
import hashlib
import io
from pathlib import Path

import numpy as np
import pytest
from support.faults import has_param
from support.observed_backends import Observed

import agentflow as af
from agentflow.protocol import ops
from agentflow.protocol.images import MAX_IMAGE_BYTES, UPLOAD_BYTES, image_file, known_file

pytestmark = pytest.mark.anyio


def png(name: str, num_bytes: int = 0) -> bytes:
    """Bytes that begin as a PNG does, different for each name."""
    return b"\x89PNG\r\n\x1a\n" + name.encode() + bytes(num_bytes)


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


async def test_a_session_sends_the_bytes_of_an_image_once(server):
    data = png("once")
    observed = Observed(af.Remote(server.url))
    async with af.session(backend=observed) as flow:
        for _ in range(2):
            async with flow.state() as s:
                s += af.user("look: ", af.image(data)) + af.assistant(af.gen("x"))
                async with s.fork(3) as branches:
                    for branch in branches:
                        branch += af.user(af.image(data)) + af.assistant(af.gen("y"))
                assert await s["x"]
                await branches
    assert observed.of(ops.Upload) == [ops.Upload(digest(data), len(data), 0, data)]
    assert {op.source for op in observed.of(ops.Image)} == {digest(data)}
    assert len(observed.of(ops.Image)) == 8


async def test_a_large_image_is_sent_in_parts(server):
    data = png("large", 2 * UPLOAD_BYTES)
    calls = []
    observed = Observed(af.Remote(server.url))
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += af.user(af.image(data)) + af.assistant(af.gen("x"))
        assert await s["x"]
        calls = await s.messages()
    sent = observed.of(ops.Upload)
    assert [op.at for op in sent] == [0, UPLOAD_BYTES, 2 * UPLOAD_BYTES]
    assert b"".join(op.data for op in sent) == data
    assert calls[0]["content"] == [{"type": "image_url", "image_url": {"url": image_file(data).url}}]


async def test_an_image_is_released_when_nothing_uses_it():
    first, second = png("first"), png("second")
    observed = Observed(af.Scripted("a"))
    async with af.session(backend=observed) as flow:
        async with flow.state() as s:
            s += af.user(af.image(first))
            await s
        del s
        gc.collect()
        assert known_file(digest(first)) is None
        async with flow.state() as s:
            s += af.user(af.image(second))
            await s
            assert observed.of(ops.Release) == [ops.Release(digest(first))]
            s += af.user(af.image(first))  # sent again
            await s
    assert [op.source for op in observed.of(ops.Upload)] == [digest(one) for one in (first, second, first)]


async def test_an_image_that_is_loaded_again_is_released_later():
    first, other = png("loaded twice"), png("another")
    observed = Observed(af.Scripted("a"))
    async with af.session(backend=observed) as flow:
        for _ in range(2):  # the second time, nothing was sent since the first image left
            async with flow.state() as s:
                s += af.user(af.image(first))
                await s
            del s
            gc.collect()
        async with flow.state() as s:
            s += af.user(af.image(other))
            await s
    assert observed.of(ops.Release) == [ops.Release(digest(first))]
    assert [op.source for op in observed.of(ops.Upload)] == [digest(first), digest(other)]


async def test_a_script_sees_the_images_of_its_prompt():
    data = png("seen")
    backend = af.Scripted("a cat")
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.user("What is ", af.image(data), f" and {af.image('https://example.org/x.png')}?")
        s += af.assistant(af.gen("x"))
        assert await s["x"] == "a cat"
        assert await s.text() == "<user>What is <image> and <image>?</user><assistant>a cat</assistant>"
    assert backend.calls[0].messages == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is "},
                {"type": "image_url", "image_url": {"url": image_file(data).url}},
                {"type": "text", "text": " and "},
                {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}},
                {"type": "text", "text": "?"},
            ],
        }
    ]


async def test_pictures_and_arrays_become_files():
    pillow = pytest.importorskip("PIL.Image")
    pixels = np.arange(4 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3)
    picture = pillow.fromarray(pixels)
    from_array, from_picture = af.image(pixels).image, af.image(picture).image
    assert from_array is from_picture
    assert from_array.media_type == "image/png"
    with pytest.raises(af.errors.BadArgument, match="uint8"):
        af.image(pixels.astype(np.float32))
    with pytest.raises(af.errors.BadArgument, check=has_param("image")):
        af.image(np.zeros((2, 2, 7), dtype=np.uint8))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I;16"])
def test_f37_pictures_of_every_mode_of_colors_become_files(mode: str):
    pillow = pytest.importorskip("PIL.Image")
    picture = pillow.new(mode, (4, 3))
    assert af.image(picture).image.media_type == "image/png"


def test_f37_a_picture_that_was_changed_after_it_was_read_becomes_a_file():
    pillow = pytest.importorskip("PIL.Image")
    written = io.BytesIO()
    pillow.new("RGB", (4, 3)).save(written, "JPEG")
    picture = pillow.open(written)
    picture.load()
    assert af.image(picture).image.media_type == "image/jpeg"
    picture.putalpha(9)
    assert af.image(picture).image.media_type == "image/png"


async def test_a_graph_keeps_its_images():
    data = png("traced")

    @af.program
    async def describe(s: af.State, question: str) -> str:
        s += af.user(af.image(data), question) + af.assistant(af.gen("x"))
        return await s["x"]

    graph = describe.trace()
    gc.collect()
    observed = Observed(af.Scripted(lambda call: str(call.messages[0]["content"][0]["image_url"]["url"])))
    async with af.session(backend=observed) as flow:
        for question in ("What?", "Who?"):
            assert await flow.submit(graph, {"question": question}) == image_file(data).url
    assert len(observed.of(ops.Upload)) == 1


async def test_several_models_have_the_images_of_the_session():
    data = png("several")
    small, large = af.Scripted("a draft"), af.Scripted("a verdict")
    async with af.session(models={"small": small, "large": large}) as flow, flow.state() as s:
        s += af.user(af.image(data)) + af.assistant(af.gen("draft"))
        judge = s.copy(model="large")
        judge += af.user("Judge.") + af.assistant(af.gen("verdict"))
        assert await judge["verdict"] == "a verdict"
    assert large.calls[0].messages[0] == small.calls[0].messages[0]


async def test_a_recording_has_each_image_once_beside_it(tmp_path: Path):
    data = png("recorded", UPLOAD_BYTES)

    async def use(flow: af.OpenSession) -> str:
        async with flow.state() as s, s.fork(2) as branches:
            for branch in branches:
                branch += af.user(af.image(data)) + af.assistant(af.gen("x"))
            return "".join([await branch["x"] for branch in branches])

    path = tmp_path / "run.jsonl"
    async with af.session(backend=af.Scripted(lambda call: "seen"), record=path) as flow:
        assert await use(flow) == "seenseen"
    assert path.stat().st_size < 20_000
    kept = list((tmp_path / "run.jsonl.images").iterdir())
    assert [file.name for file in kept] == [digest(data).replace(":", "-")]
    assert kept[0].read_bytes() == data
    async with af.session(backend=af.Replay(path)) as flow:
        assert await use(flow) == "seenseen"


def test_a_file_of_the_largest_size_is_taken():
    assert af.image(png("", MAX_IMAGE_BYTES - 8)).image.data
    with pytest.raises(af.errors.BadArgument, match="more than"):
        af.image(png("", MAX_IMAGE_BYTES - 7))


async def test_an_image_of_ops_that_cannot_be_sent_is_sent_with_later_ones():
    data = png("again")
    large = Observed(af.Scripted("a cat"))
    async with af.session(models={"small": af.Scripted("a"), "large": large}) as flow:
        async with flow.state(model="large") as s:
            large.lose(af.ServerLost("restarted"), is_final=False)
            with pytest.raises(af.ServerLost):
                s += af.user(af.image(data))
        async with flow.state(model="large") as s:
            s += af.user(af.image(data)) + af.assistant(af.gen("x"))
            assert await s["x"] == "a cat"


async def test_a_model_whose_session_begins_again_gets_the_images_again():
    data = png("kept")
    small, large = Observed(af.Scripted("a draft")), Observed(af.Scripted("a verdict"))
    async with af.session(models={"small": small, "large": large}) as flow, flow.state() as s:
        s += af.user(af.image(data))
        await s
        large.lose(af.ServerLost("restarted"), is_final=False)
        assert large.of(ops.Upload) == 2 * [ops.Upload(digest(data), len(data), 0, data)]
        assert len(small.of(ops.Upload)) == 1


async def test_the_address_of_an_image_refers_to_no_variable():
    async with af.session(backend=af.Scripted("a")) as flow, flow.state() as s:
        s += af.user("Name it: ") + af.assistant(af.gen("name"))
        url = f"https://example.org/{s['name']}.png"
        message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        for item in (af.user(af.image(url)), af.conversation([message])):
            async with flow.state() as other:
                with pytest.raises(af.errors.BadArgument):
                    other += item


CLIP = b"\x00\x00\x00\x18ftypmp42 a clip"


async def test_a_video_is_uploaded_once_and_seen_by_the_script():
    observed = Observed(af.Scripted("a goal"))
    async with af.session(backend=observed) as flow, flow.state() as s:
        s += af.user(f"What happens in {af.video(CLIP, num_frames=4)}?", af.video(CLIP))
        s += af.assistant(af.gen("x"))
        assert await s["x"] == "a goal"
        messages = await s.messages()
        assert "[video]" in str(s)
    assert observed.of(ops.Upload) == [ops.Upload(digest(CLIP), len(CLIP), 0, CLIP, "video")]
    assert [op.num_frames for op in observed.of(ops.Video)] == [4, None]
    url = image_file(CLIP, "video").url
    assert messages[0]["content"] == [
        {"type": "text", "text": "What happens in "},
        {"type": "video_url", "video_url": {"url": url, "num_frames": 4}},
        {"type": "text", "text": "?"},
        {"type": "video_url", "video_url": {"url": url}},
    ]
    async with af.session(backend=Observed(backend := af.Scripted("a goal"))) as flow, flow.state() as s:
        s += af.conversation(messages[:1]) + af.gen("x")
        assert await s["x"] == "a goal"
    assert backend.calls[0].messages == messages[:1]


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (CLIP, "video/mp4"),
        (b"\x00\x00\x00\x14ftypqt  \x00", "video/quicktime"),
        (b"\x1aE\xdf\xa3\x01\x00\x42\x82\x84webm", "video/webm"),
        (b"\x1aE\xdf\xa3\x01\x00\x42\x82\x88matroska", "video/x-matroska"),
        (b"RIFF\x00\x00\x00\x00AVI LIST", "video/x-msvideo"),
        (b"\x00\x00\x01\xba\x44", "video/mpeg"),
        (png("no video"), None),
        (b"\x00\x00\x00\x1cftypavif", None),
        (b"", None),
    ],
)
def test_the_first_bytes_show_the_kind_of_a_video(data: bytes, media_type: str | None):
    if media_type is None:
        with pytest.raises(af.errors.BadArgument) as caught:
            af.video(data)
        assert caught.value.param == "video"
    else:
        assert af.video(data).file.media_type == media_type


def test_frames_of_a_video_become_images():
    av = pytest.importorskip("av")
    written = io.BytesIO()
    with av.open(written, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(8):
            pixels = np.full((32, 32, 3), 30 * number, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    pillow = pytest.importorskip("PIL.Image")
    shown = af.video(written.getvalue(), num_frames=4, as_images=True).parts
    levels = [np.asarray(pillow.open(io.BytesIO(part.image.data))).mean() for part in shown]
    assert np.allclose(levels, [30, 90, 150, 210], atol=12)
    for broken in (written.getvalue()[:60], written.getvalue()[:-200], CLIP):
        with pytest.raises(af.errors.BadArgument):
            af.video(broken, as_images=True)


@pytest.mark.parametrize("num_frames", [0, -1, 2.5, True, 10_000])
def test_a_video_has_a_whole_number_of_frames(num_frames: object):
    with pytest.raises(af.errors.BadArgument) as caught:
        af.video(CLIP, num_frames=num_frames)
    assert caught.value.param == "num_frames"


@af.program
async def compare(s: af.State, first: af.Image | Path, question: str, second: af.Image) -> str:
    s += af.user(f"{af.image(first)} {question} {second}") + af.assistant(af.gen("x"))
    return await s["x"]


async def test_a_graph_has_images_as_arguments(tmp_path: Path):
    one, other = png("one"), png("other")
    path = tmp_path / "one.png"
    path.write_bytes(one)
    graph = compare.trace()
    assert graph.parameters == ("first", "question", "second")
    assert compare.trace().optimised() == graph.optimised()
    assert "first" in graph.draw()
    observed = Observed(backend := af.Scripted(lambda call: str(len(backend.calls))))
    async with af.session(backend=observed) as flow:
        assert await flow.submit(graph, path, "or", af.image(other)) == "1"
        inputs = {"first": other, "question": "or", "second": path}
        assert await flow.submit(graph.optimised(), inputs) == "2"
        assert await flow.map(graph, [(path, "or", other), inputs]) == ["3", "4"]
        assert await flow.run(compare, path, "or", af.image(other)) == "5"
    urls = [image_file(data).url for data in (one, other)]
    seen = [
        [part["image_url"]["url"] for part in call.messages[0]["content"] if part["type"] == "image_url"]
        for call in backend.calls
    ]
    assert seen[0] == seen[2] == seen[4] == urls
    assert seen[1] == seen[3] == urls[::-1]
    assert [op.source for op in observed.of(ops.Upload)].count(digest(one)) >= 1


async def test_a_graph_has_a_video_as_an_argument():
    @af.program
    async def watch(s: af.State, clip: af.Video) -> str:
        s += af.user(af.video(clip, num_frames=4), "What happens?") + af.assistant(af.gen("x"))
        return await s["x"]

    graph = watch.trace()
    backend = af.Scripted("a goal")
    async with af.session(backend=backend) as flow:
        assert await flow.submit(graph, CLIP) == "a goal"
        for wrong in (b"no clip", 3, "missing.mp4"):
            with pytest.raises(af.errors.BadArgument):
                await flow.submit(graph, clip=wrong)
        with pytest.raises(af.errors.BadArgument):
            await flow.submit(graph)
    url = image_file(CLIP, "video").url
    assert backend.calls[0].messages[0]["content"][0]["video_url"] == {"url": url, "num_frames": 4}


async def test_a_map_holds_the_images_of_its_running_programs_only(tmp_path: Path):
    names = [f"{number:02}" for number in range(24)]
    for name in names:
        (tmp_path / name).write_bytes(png(name))
    most = 0

    def answer(call: af.ScriptedCall) -> str:
        nonlocal most
        most = max(most, sum(known_file(digest(png(name))) is not None for name in names))
        return "seen"

    @af.program
    async def describe(s: af.State, photo: Path) -> str:
        s += af.user(af.image(photo), "What is this?") + af.assistant(af.gen("x"))
        return await s["x"]

    inputs = [{"photo": tmp_path / name} for name in names]
    gc.collect()
    gc.disable()
    try:
        async with af.session(backend=af.Scripted(answer)) as flow:
            assert await flow.map(describe, inputs, concurrency=2) == ["seen"] * 24
    finally:
        gc.enable()
    assert 1 <= most <= 4


async def test_the_images_of_a_program_that_has_ended_are_free():
    data, states = png("ended"), []

    @af.program
    async def describe(s: af.State, photo: object) -> None:
        states.append(s)
        s += af.user(af.image(photo))

    async with af.session(backend=af.Scripted("a")) as flow:
        await flow.run(describe, data)
        with pytest.raises(af.errors.StateClosed):
            await states[0].messages()
        kept = af.image(data)  # another part of the program has it
        assert (await states[0].messages())[0]["content"][0]["image_url"]["url"] == kept.image.url


async def test_a_resumed_map_knows_its_images_by_their_digests(tmp_path: Path):
    @af.program
    async def describe(s: af.State, photo: object) -> str:
        s += af.user(af.image(photo), "What is this?") + af.assistant(af.gen("x"))
        return await s["x"]

    path = tmp_path / "results.jsonl"
    file = tmp_path / "a.png"
    file.write_bytes(png("a"))
    first = af.Scripted(lambda call: "first")
    async with af.session(backend=first) as flow:
        await flow.map(describe, [af.image(png("a")), file, {"photo": af.image(png("b"))}], resume=path)
    assert len(first.calls) == 3
    again = af.Scripted(lambda call: "again")
    async with af.session(backend=again) as flow:
        inputs = [{"photo": af.image(png("b"))}, af.image(png("a")), file, af.image(png("c"))]
        assert await flow.map(describe, inputs, resume=path) == ["first", "first", "first", "again"]
    assert len(again.calls) == 1
