"""Images in the whole engine: a second question about an image, a fork of questions over it, and the first
answer to an image next to streams of text.

The model of ``vision`` is used, with a tokenizer and a chat template. A file is read, encoded and computed as
in a session. New images are noise of other seeds, so nothing of them is cached.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import numpy as np
from PIL import Image
from tokenizers.pre_tokenizers import ByteLevel

from agentflow.engine.generator.context import EngineContext
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.local_engine import open_generator
from agentflow.engine.machine.resources import collect_garbage_rarely
from agentflow.protocol.events import Usage
from agentflow.protocol.images import image_file
from agentflow.protocol.sampling import GenParams
from benchmarks.engine.vision_loop import measure_sections
from benchmarks.report import Report

NUM_QUESTIONS = 8
NUM_STREAMS = 4
NUM_STREAMED = 4_000
NUM_RUN_IN = 30
TEMPLATE = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}: "
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
WORDS = ("User", "Assistant", "Question", "Which", "color", "ĠWhich", "Ġcolor")


def write_texts(folder: Path, vocab_size: int, image_token: int) -> None:
    """Writes a tokenizer in which every id is a text, and the template."""
    vocabulary = {char: number for number, char in enumerate(sorted(ByteLevel.alphabet()))}
    merges: list[list[str]] = []
    for word in WORDS:
        for end in range(1, len(word)):
            if word[: end + 1] not in vocabulary:
                vocabulary[word[: end + 1]] = len(vocabulary)
                merges.append([word[:end], word[end]])
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    names = ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>", *tiles]
    first = image_token - len(names)
    special = {first + number: name for number, name in enumerate(names)} | {image_token: "<image>"}
    for number in range(len(vocabulary), vocab_size):
        if number not in special:
            vocabulary[f"w{number}Ġ"] = number
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec = {
        "version": "1.0",
        "added_tokens": [{"id": n, "content": name, "special": True, **flags} for n, name in special.items()],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def run(folder: Path, report: Report, only: str, num_threads: int) -> None:
    """Measures the parts whose names contain ``only``."""
    options = {"model": str(folder), "kv_tokens": 24_000, "dtype": "bfloat16", "threads": num_threads}

    async def measure() -> None:
        async with open_generator(**options) as generator:
            collect_garbage_rarely()  # as ``agentflow serve`` does: transformers has 400,000 objects
            bench = _Bench(generator, 3 if report.scale == "full" else 2)
            if only in "second_question":
                await bench.measure_second_question(report)
            if only in "fork_gain":
                await bench.measure_fork(report)
            if only in "beside_streams":
                await bench.measure_beside_streams(report)
            if only in "sections":
                await measure_sections(generator, report)

    asyncio.run(measure())


class _Bench:
    def __init__(self, generator: EngineGenerator, num_runs: int) -> None:
        self._generator = generator
        self._num_runs = num_runs
        self._num_images = 0

    def _new_image(self) -> bytes:
        self._num_images += 1
        noise = np.random.default_rng(self._num_images).integers(0, 256, (512, 512, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "PNG")
        return file.getvalue()

    def _asked(self, data: bytes | None, text: str) -> EngineContext:
        generator = self._generator
        context = generator.open("")
        generator.begin_role(context, "user")
        if data is not None:
            generator.image(context, image_file(data))
        generator.fill(context, text)
        generator.end_role(context)
        generator.begin_role(context, "assistant")
        return context

    async def _answer(
        self, context: EngineContext, max_tokens: int = 1, on_text: Callable[[str], None] = lambda _: None
    ) -> Usage:
        params = GenParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        found = await self._generator.generate(context, params, on_text)
        self._generator.free(context)
        return found.usage

    async def measure_second_question(self, report: Report) -> None:
        """Measures the share of a second prompt that is computed, and its time."""
        shares, times = [], []
        await self._answer(self._asked(self._new_image(), "Which color?"))  # a warm-up
        for _ in range(self._num_runs):
            image = self._new_image()
            began = time.perf_counter()
            await self._answer(self._asked(image, "Which color?"))
            first_s = time.perf_counter() - began
            began = time.perf_counter()
            usage = await self._answer(self._asked(image, "Question: color?"))
            second_s = time.perf_counter() - began
            shares.append((usage.prompt_tokens - usage.cached_tokens) / usage.prompt_tokens)
            times.append((first_s, second_s))
        best = [min(column) for column in zip(*times, strict=True)]
        note = (
            f"tokens computed of {usage.prompt_tokens:,}; first answers at best after {best[0]:.2f} s, "
            f"then {1e3 * best[1]:.0f} ms"
        )
        report.median("vision.second_question_share", shares, "ratio", note=note, goal="<= 0.05")

    async def measure_fork(self, report: Report) -> None:
        """Measures how much faster questions over one image are than as many images with a question each,
        of which nothing is cached."""
        gains, times = [], []
        questions = [f"Question {number}: Which color?" for number in range(NUM_QUESTIONS)]
        for _ in range(self._num_runs):
            image = self._new_image()
            shared_s = await self._together([self._asked(image, question) for question in questions])
            alone_s = await self._together([self._asked(self._new_image(), one) for one in questions])
            gains.append(alone_s / shared_s)
            times.append((shared_s, alone_s))
        best = [min(column) for column in zip(*times, strict=True)]
        note = (
            f"{NUM_QUESTIONS} questions, answers of 8 tokens: over one image {best[0]:.2f} s, with nothing "
            f"cached {best[1]:.2f} s"
        )
        report.median("vision.fork_gain", gains, "ratio", note=note, goal=">= 5")

    async def _together(self, contexts: list[EngineContext]) -> float:
        """The seconds until all have an answer of 8 tokens."""
        began = time.perf_counter()
        async with anyio.create_task_group() as group:
            for context in contexts:
                group.start_soon(partial(self._answer, context, 8))
        return time.perf_counter() - began

    async def measure_beside_streams(self, report: Report) -> None:
        """Measures the time to the first answer to an image while streams run, relative to an idle engine,
        and the longest pause of the streams meanwhile."""
        ratios, stalls, gaps = [], [], []
        for _ in range(self._num_runs):
            began = time.perf_counter()
            await self._answer(self._asked(self._new_image(), "Which color?"))
            alone_s = time.perf_counter() - began
            image = self._new_image()
            arrived: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
            run_in = anyio.Event()
            async with anyio.create_task_group() as group:
                for number, times in enumerate(arrived):
                    context = self._asked(None, f"Question {number}")
                    stream = partial(self._answer, context, NUM_STREAMED, _noting(times, run_in))
                    group.start_soon(stream)
                await run_in.wait()
                began = time.perf_counter()
                await self._answer(self._asked(image, "Which color?"))
                ended = time.perf_counter()
                group.cancel_scope.cancel()
            ratios.append((ended - began) / alone_s)
            pairs = [pair for times in arrived for pair in itertools.pairwise(times)]
            before = [after - one for one, after in pairs if after < began]
            during = [after - one for one, after in pairs if began < after < ended]
            stalls.append(1e3 * max(during))
            gaps.append((1e3 * statistics.median(before), 1e3 * statistics.median(during)))
        report.median(
            "vision.first_answer_beside_streams",
            ratios,
            "ratio",
            note=f"next to {NUM_STREAMS} streams of text, against alone",
            goal="<= 3",
        )
        before_ms, during_ms = (statistics.median(column) for column in zip(*gaps, strict=True))
        note = (
            f"the longest pause of a stream; between its tokens {during_ms:.0f} ms, before {before_ms:.0f} ms"
        )
        report.median("vision.max_stall_ms", stalls, "ms", note=note, goal="<= 50")


def _noting(times: list[float], run_in: anyio.Event) -> Callable[[str], None]:
    """Records when each text arrives. ``run_in``: set when the stream runs steadily."""

    def note(_: str) -> None:
        times.append(time.perf_counter())
        if len(times) == NUM_RUN_IN:
            run_in.set()

    return note
