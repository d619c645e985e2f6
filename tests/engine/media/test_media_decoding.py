"""Decoding files of images and videos: alpha, orientation, depth, and damaged files."""

from __future__ import annotations

import functools
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.examples import examples
from support.media_files import animation, bomb, encoded, noise, turned_right, video

from agentflow.engine.media.decoding import decode_image, decode_video
from agentflow.engine.media.processors.pixels import FrameSampling
from agentflow.errors import BadArgument

pytestmark = pytest.mark.timeout(120)

KINDS = ("PNG", "JPEG", "GIF", "WEBP")


def _rejected(data: bytes) -> None:
    with pytest.raises(BadArgument) as raised:
        decode_image(data)
    assert raised.value.param == "image"
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_decide_about_the_format(kind: str) -> None:
    data = encoded(noise(9, 7), kind)
    expected = Image.open(io.BytesIO(data)).convert("RGB")
    assert decode_image(data).tobytes() == expected.tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = noise(4, 6)
    turned = decode_image(encoded(image, "PNG", exif=exif))
    pixels = np.asarray(image)
    expected = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, -1),
        7: pixels[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(pixels),
    }[orientation]
    np.testing.assert_array_equal(np.asarray(turned), expected)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparent_pixels_are_laid_on_white(kind: str) -> None:
    image = Image.new("RGBA", (3, 1))
    for x, alpha in enumerate((0, 128, 255)):
        image.putpixel((x, 0), (0, 100, 200, alpha))
    decoded = decode_image(encoded(image, kind, lossless=True, exact=True))
    found = np.asarray(decoded)[0].astype(int)
    np.testing.assert_allclose(found, [[255, 255, 255], [127, 177, 227], [0, 100, 200]], atol=1)


def test_a_transparent_color_of_a_palette_is_laid_on_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    decoded = decode_image(encoded(image, "PNG", transparency=1))
    assert np.asarray(decoded).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_16_bits_are_scaled() -> None:
    values = np.array([[0, 255, 256, 32_768, 65_535]], dtype=np.uint16)
    decoded = np.asarray(decode_image(encoded(Image.fromarray(values))))
    assert decoded[..., 0].tolist() == [[0, 0, 1, 128, 255]]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "CMYK"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = noise(5, 4).convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    decoded = decode_image(encoded(image, kind, quality=100))
    assert (decoded.mode, decoded.size) == ("RGB", (4, 5))
    difference = np.abs(np.asarray(decoded).astype(int) - np.asarray(image.convert("RGB")))
    assert difference.mean() < 20


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame_is_read(kind: str) -> None:
    red, green, blue = np.asarray(decode_image(animation(kind)))[5, 10].tolist()
    assert red > 240
    assert max(green, blue) < 15


def test_a_bomb_is_rejected_by_its_header() -> None:
    _rejected(bomb())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        b"<?xml version='1.0'?><svg/>",
        b"%PDF-1.4",
        b"GIF89a",
        encoded(noise(3, 3), "BMP"),
        encoded(noise(3, 3), "TIFF"),
    ],
)
def test_other_formats_are_rejected(data: bytes) -> None:
    _rejected(data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_another_behind_it_is_the_first(kind: str) -> None:
    data = encoded(noise(6, 6), kind)
    both = decode_image(data + b"PK\x03\x04<script>alert(1)</script>" + encoded(noise(3, 3), "JPEG"))
    assert both.tobytes() == decode_image(data).tobytes()


FILES = {kind: encoded(noise(24, 31), kind) for kind in KINDS} | {"animation": animation()}


@examples(300)
@given(
    kind=st.sampled_from(sorted(FILES)),
    share=st.floats(0, 1),
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=4)), max_size=4
    ),
)
def test_damaged_files_are_read_or_rejected(
    kind: str, share: float, changes: list[tuple[float, bytes]]
) -> None:
    data = bytearray(FILES[kind])
    for place, content in changes:
        at = int(place * len(data))
        data[at : at + len(content)] = content
    mode, param = "RGB", "image"
    try:
        mode = decode_image(bytes(data[: int(share * len(data))])).mode
    except BadArgument as error:
        param = error.param or ""
    assert (mode, param) == ("RGB", "image")


@functools.cache
def _video_and_frames(
    kind: str, max_b_frames: int
) -> tuple[bytes, list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]]:
    """A video of 45 frames, and all frames as a sequential reader decodes them."""
    import av

    data = video(45, kind, max_b_frames=max_b_frames)
    with av.open(io.BytesIO(data)) as container:
        return data, [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize(
    ("kind", "max_b_frames"), [("mp4", 0), ("mp4", 2), ("avi", 0), ("webm", 0), ("matroska", 0)]
)
@pytest.mark.parametrize("num_frames", [1, 3, 8, 32, 60])
def test_frames_of_a_video_are_sampled_at_equal_distances(
    kind: str, max_b_frames: int, num_frames: int
) -> None:
    data, everything = _video_and_frames(kind, max_b_frames)
    clip = decode_video(data, FrameSampling(num_frames, num_frames))
    count = min(num_frames, len(everything))
    wanted = [index * len(everything) // count for index in range(count)]
    frames = [np.asarray(frame) for frame in clip.frames]
    assert (len(clip), clip.size, clip.duration_s) == (count, (48, 64), pytest.approx(4.5))
    assert clip.times_s == pytest.approx([index / 10 for index in wanted])
    assert len(frames) == count
    for frame, index in zip(frames, wanted, strict=True):
        np.testing.assert_array_equal(frame, everything[index])


def test_frames_are_turned_as_the_video_says() -> None:
    upright = video(3)
    turned = decode_video(turned_right(upright), FrameSampling(3, 3))
    assert turned.size == (64, 48)
    for before, after in zip(decode_video(upright, FrameSampling(3, 3)).frames, turned.frames, strict=True):
        np.testing.assert_array_equal(np.asarray(after), np.rot90(np.asarray(before), -1))


@functools.cache
def whole_video(kind: str) -> bytes:
    return video(30, kind)


@examples(100)
@given(
    kind=st.sampled_from(["avi", "mp4", "webm"]),
    share=st.floats(0, 1),
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=4)), max_size=4
    ),
)
def test_damaged_videos_are_read_or_rejected(
    kind: str, share: float, changes: list[tuple[float, bytes]]
) -> None:
    data = bytearray(whole_video(kind))
    for place, content in changes:
        at = int(place * len(data))
        data[at : at + len(content)] = content
    missing, param = 0, "video"
    try:
        clip = decode_video(bytes(data[: int(share * len(data))]), FrameSampling(6, 6))
        missing = len(clip) - len(list(clip.frames))
    except BadArgument as error:
        param = error.param or ""
    assert (missing, param) == (0, "video")


@pytest.mark.parametrize("data", [b"", b"#EXTM3U\nhttp://127.0.0.1/x.ts", encoded(noise(3, 3)), bytes(64)])
def test_other_files_are_no_videos(data: bytes) -> None:
    with pytest.raises(BadArgument) as raised:
        decode_video(data, FrameSampling(4, 4))
    assert raised.value.param == "video"
