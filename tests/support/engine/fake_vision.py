"""A model with vision on the deterministic runner: how its images are prepared, and what it answers alone."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable

import numpy as np
from support.small_tokenizers import byte_level

from agentflow.engine.fake_runner import FakeEncoding, FakeRunner
from agentflow.engine.media_run import MediaPiece, MediaRun, PreparedMedium, pseudo_tokens, rope_positions
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import BadArgument
from agentflow.protocol.images import Image, image_file

TOKENIZER = Tokenizer(byte_level(special=("<|im_start|>", "<|im_end|>", "<image>", "<row>")))
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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


class FakeReader:
    """Prepares files of ``picture``. ``read``: the sources that it read."""

    image_token = "<image>"

    def __init__(self, **options) -> None:
        self.options = options
        self.read: list[str] = []

    async def read_image(self, image: Image, *, tenant: str = "") -> PreparedMedium:
        self.read.append(image.source)
        if not image.data:
            raise BadArgument("image: a URL is not read", param="image")
        return prepared(image.data.removeprefix(b"\x89PNG\r\n"), **self.options)


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
    """What the fake runner generates after a prompt, token by token, without cache or slots."""
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
