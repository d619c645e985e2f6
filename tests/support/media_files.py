"""Files of images and videos, also damaged and hostile ones, made on the spot."""

from __future__ import annotations

import io
import struct
import zlib
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    """A random image in RGB."""
    values = np.random.default_rng([seed, height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The image in a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def bomb(width: int = 100_000, height: int = 100_000) -> bytes:
    """A small PNG file of a huge black image in gray."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    row = zlib.compressobj()
    data = row.compress(bytes(10_000_000)) + row.flush()
    return (
        b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")
    )


def animation(kind: str = "GIF") -> bytes:
    """Three frames: red, green, blue."""
    frames = [Image.new("RGB", (20, 10), color) for color in ("red", "lime", "blue")]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)


def video(
    num_frames: int, kind: str = "mp4", size: tuple[int, int] = (48, 64), fps: int = 10, max_b_frames: int = 0
) -> bytes:
    """A video whose frame ``n`` has about the gray ``4 * n``, and half of it on the right."""
    import av

    height, width = size
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream("mpeg4" if kind in ("mp4", "avi") else "libvpx", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.gop_size = 12
        if kind in ("mp4", "avi"):
            stream.codec_context.max_b_frames = max_b_frames
        for index in range(num_frames):
            picture = np.full((height, width, 3), 4 * index % 256, dtype=np.uint8)
            picture[:, width // 2 :] //= 2
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def turned_right(mp4: bytes) -> bytes:
    """The video with the note that its frames are to be turned by a quarter to the right."""
    matrix = mp4.index(b"tkhd") + 44
    one = 1 << 16
    turn = struct.pack(">9i", 0, one, 0, -one, 0, 0, 0, 0, 1 << 30)
    return mp4[:matrix] + turn + mp4[matrix + len(turn) :]
