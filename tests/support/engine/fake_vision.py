"""A model with vision on the deterministic runner: its preparation of images, and its answers alone."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable

import numpy as np
from support.small_tokenizers import byte_level

from agentflow.engine.media_run import MediaPiece, MediaRun, PreparedMedium, pseudo_tokens, rope_positions
from agentflow.engine.simulator.fake_runner import FakeEncoding, FakeRunner
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import BadArgument
from agentflow.protocol.images import Image, Video, image_file, medium_key

TOKENIZER = Tokenizer(byte_level(special=("<|im_start|>", "<|im_end|>", "<image>", "<video>", "<row>")))
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'video' %}[<video>]"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_MP4 = b"\x00\x00\x00\x18ftypmp42"
DEFAULT_FRAMES = 3


def picture(name: str) -> Image:
    """A file that looks like a picture."""
    return image_file(b"\x89PNG\r\n" + name.encode())


def prepared(
    name: bytes, *, sees_all: bool = False, num_bytes: int = 3000, num_rows: int = 6
) -> PreparedMedium:
    """Two tiles of ``num_rows`` tokens, with markup before each. Positions have one axis."""
    pixels = np.frombuffer(hashlib.shake_256(name).digest(num_bytes), np.uint8)
    settings = f"{sees_all} {num_rows}".encode()
    identity = hashlib.sha256(settings + pixels.tobytes()).hexdigest()
    positions = np.arange(num_rows)[np.newaxis]
    tiles = [MediaPiece(positions, first, sees_all) for first in (0, num_rows)]
    return PreparedMedium(identity, {"pixels": pixels}, ("<row>", tiles[0], "<row>", tiles[1]))


def clip(name: str) -> Image:
    """A file that looks like a video."""
    return image_file(_MP4 + name.encode(), "video")


def prepared_clip(name: bytes, num_frames: int | None) -> PreparedMedium:
    """Frames of two tokens, with markup before each."""
    count = num_frames or DEFAULT_FRAMES
    whole = prepared(name, num_bytes=30 * count, num_rows=1)
    identity = hashlib.sha256(f"video {count} {whole.identity}".encode()).hexdigest()
    pieces: list[str | MediaPiece] = []
    for frame in range(count):
        pieces += ["<row>", MediaPiece(np.arange(2)[np.newaxis], 2 * frame)]
    return PreparedMedium(identity, whole.arrays, tuple(pieces))


class FakeReader:
    """Prepares files of ``picture`` and ``clip``. ``read``: the sources that it read."""

    image_token = "<image>"
    video_token = "<video>"

    def __init__(self, **options) -> None:
        self.options = options
        self.read: list[str] = []

    async def read_image(self, image: Image, *, tenant: str = "") -> PreparedMedium:
        self.read.append(image.source)
        if not image.data:
            raise BadArgument("image: a URL is not read", param="image")
        return prepared(image.data.removeprefix(b"\x89PNG\r\n"), **self.options)

    async def read_video(self, video: Video, *, tenant: str = "") -> PreparedMedium:
        self.read.append(medium_key(video))
        name = video.file.data.removeprefix(_MP4)
        if not name or name == b"broken":
            raise BadArgument("video: it is damaged", param="video")
        return prepared_clip(name, video.num_frames)


def next_letter(seen: np.ndarray) -> int:
    """The token after others, which is of an ASCII character."""
    return zlib.crc32(seen.tobytes()) % 90


def vision_runner(**options) -> FakeRunner:
    return FakeRunner(
        **{"vocab_size": TOKENIZER.vocab_size, "num_slots": 1024, "max_context": 512, **options},
        next_token=next_letter,
    )


def answer_alone(
    token_ids: list[int],
    media: list[PreparedMedium],
    count: int,
    next_token: Callable[[np.ndarray], int] = next_letter,
) -> list[int]:
    """The tokens of the fake runner after a prompt, token by token, without cache or slots."""
    tokens = [*token_ids]
    runs: list[MediaRun] = []
    for medium in media:
        features = FakeEncoding(medium).features
        for piece in medium.pieces:
            if isinstance(piece, str):
                continue
            ids = pseudo_tokens(piece.at(medium.identity, 0)).tolist()
            for start in range(len(token_ids) - len(ids) + 1):
                if token_ids[start : start + len(ids)] == ids:
                    runs.append(piece.at(medium.identity, start))
                    rows = features[piece.first : piece.first + len(ids)]
                    tokens[start : start + len(ids)] = (np.array(ids) + rows).tolist()
    runs.sort(key=lambda run: run.start)
    for _ in range(count):
        seen = np.array(tokens, dtype=np.int64)
        if runs:
            ropes = rope_positions(len(token_ids), runs)[0]
            ropes = np.append(ropes[:-1], ropes[-1] + np.arange(len(tokens) - len(token_ids)))
            if (ropes != np.arange(len(tokens))).any():
                seen = np.append(seen, ropes)
        tokens.append(next_token(seen))
    return tokens[len(token_ids) :]
