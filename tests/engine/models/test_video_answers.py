"""Questions about clips on models with random weights: from the file of a video to the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.engine.device import DEVICE
from support.engine.vision_models import saved_vision_model
from support.faults import has_param
from support.media_files import video
from support.small_tokenizers import byte_level

from agentflow.engine.client import running_engine
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.media.reader import media_reader
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.errors import BadArgument
from agentflow.protocol.images import Video, image_file
from agentflow.protocol.sampling import GenParams

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240), pytest.mark.gpu]

SPECIAL = ("<image>", "<video>", "<|vision_start|>", "<|video_pad|>", "<|vision_end|>")
TOKENIZER = Tokenizer(byte_level(special=SPECIAL, vocab_size=300))
# Like LLaVA's template: media before the texts.
MEDIA_FIRST = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'video') %}<video>\n{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
IN_ORDER = (
    "{% for m in messages %}{{ m.role }}\n{% for part in m.content %}{% if part.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)
PARAMS = GenParams(max_tokens=6, ignore_eos=True, temperature=0.0)


@asynccontextmanager
async def model(name: str, folder: Path, template: str) -> AsyncIterator[EngineGenerator]:
    saved_vision_model(name, folder)
    reader = media_reader(folder)
    assert reader is not None

    def load() -> Any:
        return (
            TorchRunner(folder, num_slots=4000, device=DEVICE, dtype="float32"),
            TOKENIZER,
            SchedulerConfig(),
        )

    try:
        async with running_engine(load) as client:
            yield EngineGenerator(client, ChatTemplate(template), reader=reader)
    finally:
        await reader.aclose()


def asking(generator: EngineGenerator, data: bytes, num_frames: int | None, question: str, salt: str = ""):
    context = generator.open(salt)
    generator.begin_role(context, "user")
    generator.video(context, Video(image_file(data, "video"), num_frames))
    generator.fill(context, question)
    generator.end_role(context)
    generator.begin_role(context, "assistant")
    return context


async def answer(generator: EngineGenerator, context: Any) -> tuple[list[int], int]:
    """The generated ids, and the cached tokens of the prompt."""
    num_prompt = len(await generator.requests.prompt_ids(context))
    found = await generator.generate(context, PARAMS, lambda _: None)
    return context.tokens.ids()[num_prompt:], found.usage.cached_tokens


def num_of_clip(context: Any) -> int:
    return sum(one < 0 for one in context.tokens.ids())


@pytest.mark.parametrize(
    ("name", "template", "of_frame", "counts", "by_default"),
    [
        ("llava_next_video", MEDIA_FIRST, 9, (8, 32), 8),
        ("smolvlm", MEDIA_FIRST, 16, (2, 12), 4),  # one each second of 40 frames, ten a second
        ("qwen2_5_vl", IN_ORDER, 2, (8, 32), 8),  # two each second, and two in a patch
    ],
)
async def test_two_questions_on_one_clip(
    name: str, template: str, of_frame: int, counts: tuple[int, int], by_default: int, tmp_path: Path
) -> None:
    data = video(40)
    async with model(name, tmp_path, template) as generator:
        assert generator.capabilities.videos
        sizes = {}
        for num_frames in (*counts, None):
            first = asking(generator, data, num_frames, "What is it?")
            await answer(generator, first)
            ids = first.tokens.ids()
            clip_end = max(number for number, one in enumerate(ids) if one < 0) + 1
            second = asking(generator, data, num_frames, "Why is it there?")
            found, num_cached = await answer(generator, second)
            assert num_cached >= clip_end  # nothing of the clip is computed again
            uncached = asking(generator, data, num_frames, "Why is it there?", salt=str(num_frames))
            assert await answer(generator, uncached) == (found, 0)
            sizes[num_frames] = num_of_clip(first)
        assert sizes == {count: (count or by_default) * of_frame for count in (*counts, None)}


async def test_a_broken_container_fails_alone(tmp_path: Path) -> None:
    data = video(12)
    async with model("llava_next_video", tmp_path, MEDIA_FIRST) as generator:
        wanted, _ = await answer(generator, asking(generator, data, 8, "What is it?", salt="before"))
        answers: list[list[int]] = []

        async def ask_well(salt: str) -> None:
            answers.append((await answer(generator, asking(generator, data, 8, "What is it?", salt)))[0])

        async def ask_badly(broken: bytes) -> None:
            with pytest.raises(BadArgument, check=has_param("video")) as raised:
                await answer(generator, asking(generator, broken, 8, "What is it?"))
            assert "\n" not in str(raised.value)

        async with anyio.create_task_group() as group:
            for number in range(2):
                group.start_soon(ask_well, str(number))
            for broken in (data[: len(data) // 2], data[:40], data[:40] + bytes(1000)):
                group.start_soon(ask_badly, broken)
        assert answers == [wanted] * 2
