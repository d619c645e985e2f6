"""Images: a vision tower against the machine's products, the first token after an image against
transformers, and the whole engine (``vision_answers``).

The model has the shape of SmolVLM-256M (SigLIP's base tower, SmolLM2-135M's decoder) and random weights in
bfloat16. An image of 512 x 512 pixels is cut as its processor cuts it: enlarged to 2,048 x 2,048 pixels in 16
tiles, and once as a whole. Both sides get the arrays of the same processor. They run alternately.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from agentflow.engine.local_engine import limit_spinning

limit_spinning()  # as the engine sets it; before torch is loaded

import torch  # noqa: E402

from agentflow.engine.batch import Batch, BatchMedia  # noqa: E402
from agentflow.engine.media_run import MediaPiece, PreparedMedium  # noqa: E402
from agentflow.engine.models.torch_runner import TorchRunner  # noqa: E402
from agentflow.engine.runner import run_batch  # noqa: E402
from benchmarks.engine import vision_answers  # noqa: E402
from benchmarks.report import Report  # noqa: E402
from benchmarks.step.work import Shape, batch_of  # noqa: E402

NUM_THREADS = 2
TILE, TOKENS_OF_TILE = 512, 64
VOCABULARY = 49_280
IMAGE_TOKEN = 49_190
NUM_TEXT = 16
"""The tokens of text before an image, after each of its tiles, and after it."""
SIZE = 2_048
"""The size of the matrices with which the machine's products are measured."""
TEXT = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8_192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3_072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": TILE,
    "patch_size": 16,
}


def run(report: Report, console: Console, only: str) -> None:
    """``only``: "tower", "first_answer", a part of ``vision_answers``, or "" for all."""
    torch.set_num_threads(NUM_THREADS)
    with TemporaryDirectory() as folder:
        console.print("making a model of random weights …")
        theirs = make_model(Path(folder), most_tiles=4 if report.scale == "full" else 2)
        runner = TorchRunner(folder, num_slots=4_000, dtype="bfloat16", num_threads=NUM_THREADS)
        if only in "tower":
            console.print("measuring the tower …")
            measure_tower(runner, report)
        if only in "first_answer":
            console.print("measuring the first token after an image …")
            measure_first_answer(runner, theirs, report)
        runner.close()
        del runner, theirs
        console.print("measuring the whole engine …")
        vision_answers.run(Path(folder), report, only, NUM_THREADS)


def make_model(folder: Path, most_tiles: int) -> Any:
    """Saves a model to ``folder`` that cuts an image into at most ``most_tiles`` tiles in each direction.
    Returns transformers' model."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "smolvlm", text_config=TEXT, vision_config=VISION, scale_factor=4, image_token_id=IMAGE_TOKEN
    )
    torch.manual_seed(0)
    kind: Any = transformers.AutoModelForImageTextToText
    model = kind.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder)
    settings = {"size": {"longest_edge": most_tiles * TILE}, "max_image_size": {"longest_edge": TILE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    vision_answers.write_texts(folder, VOCABULARY, IMAGE_TOKEN)
    return model


def medium_of(pixels: NDArray[np.uint8], name: str) -> PreparedMedium:
    """Returns a medium of tiles, each a run of tokens."""
    places = np.arange(TOKENS_OF_TILE)[None]
    pieces = tuple(MediaPiece(places, TOKENS_OF_TILE * tile) for tile in range(len(pixels)))
    return PreparedMedium(name, {"pixels": pixels}, pieces)


def measure_tower(runner: TorchRunner, report: Report) -> None:
    """Measures the rate of the tower on one tile as a share of the rate of a product of two large matrices.
    Slices and products take turns, so that other work on the machine slows both."""
    left, right = (torch.randn(SIZE, SIZE).bfloat16() for _ in range(2))
    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, TILE, TILE), dtype=np.uint8)
    shares, rates, slices_ms = [], [], []
    for _ in range(5 if report.scale == "full" else 3):
        encoding = runner.encode_medium(medium_of(pixels, "tile"))
        num_slices, flops = encoding.num_slices, encoding.flops_per_slice
        took_s = product_s = 0.0
        for _ in range(num_slices):
            began = time.perf_counter()
            encoding.run(1)
            ended = time.perf_counter()
            left @ right
            product_s += time.perf_counter() - ended
            took_s += ended - began
            slices_ms.append(1e3 * (ended - began))
        runner.drop_medium("tile")
        rates.append(flops * num_slices / took_s / 1e9)
        shares.append(flops / took_s / (2 * SIZE**3 / product_s))
    note = f"{flops * num_slices / 1e9:.0f} GFLOP a tile, at best {max(rates):.0f} GFLOP/s"
    report.median("vision.tower_of_limit", shares, "ratio", note=note, goal=">= 0.6")
    note = f"{num_slices} slices of {flops / 1e9:.1f} GFLOP a tile; the longest {max(slices_ms):.0f} ms"
    report.median("vision.slice_ms", [float(np.median(slices_ms))], "ms", note=note)


def measure_first_answer(runner: TorchRunner, theirs: Any, report: Report) -> None:
    """Measures how much longer transformers takes for the first token after an image, in bfloat16."""
    from PIL import Image
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    rng = np.random.default_rng(1)
    image = Image.fromarray(rng.integers(0, 256, (512, 512, 3), dtype=np.uint8))
    longest = (4 if report.scale == "full" else 2) * TILE
    processor: Any = Idefics3ImageProcessorPil(
        size={"longest_edge": longest}, max_image_size={"longest_edge": TILE}
    )
    plain = processor(images=[[image]], do_rescale=False, do_normalize=False)["pixel_values"]
    pixels = np.asarray(plain)[0].astype(np.uint8)
    inputs: Mapping[str, Any] = processor(images=[[image]], return_tensors="pt")
    medium = medium_of(pixels, "image")
    ids = rng.integers(0, 49_000, NUM_TEXT).tolist()
    of_tokens, places = [-1] * NUM_TEXT, [0] * NUM_TEXT
    for tile in range(len(pixels)):
        ids += [IMAGE_TOKEN] * TOKENS_OF_TILE + rng.integers(0, 49_000, NUM_TEXT).tolist()
        of_tokens += [0] * TOKENS_OF_TILE + [-1] * NUM_TEXT
        places += [*range(TOKENS_OF_TILE * tile, TOKENS_OF_TILE * (tile + 1)), *[0] * NUM_TEXT]
    batch = image_batch(np.array(ids), np.array(of_tokens), np.array(places))
    ratios, times = [], []
    for _ in range(3):
        began = time.perf_counter()
        encoding = runner.encode_medium(medium)
        encoding.run(encoding.num_slices)
        ours = run_batch(runner, batch).token_ids
        ours_s = time.perf_counter() - began
        runner.drop_medium("image")
        began = time.perf_counter()
        with torch.inference_mode():
            logits = theirs(
                input_ids=torch.tensor([ids]),
                pixel_values=inputs["pixel_values"].bfloat16(),
                logits_to_keep=1,
            ).logits
        theirs_s = time.perf_counter() - began
        assert len(ours) == len(logits)
        ratios.append(theirs_s / ours_s)
        times.append((ours_s, theirs_s))
    best = [min(column) for column in zip(*times, strict=True)]
    note = (
        f"{len(pixels)} tiles, {len(ids):,} tokens: at best {best[0]:.2f} s, transformers {best[1]:.2f} s; "
        "goal with AMX: 1.8"
    )
    report.median("vision.first_answer_vs_transformers", ratios, "ratio", note=note, goal=">= 1.2")


def image_batch(ids: NDArray[np.int64], of_tokens: NDArray[np.int64], places: NDArray[np.int64]) -> Batch:
    """Returns a whole prompt with one image, of which the likeliest next token is wanted."""
    num = len(ids)
    media = BatchMedia(np.arange(num)[None], ("image",), of_tokens, places)
    return replace(batch_of(Shape(1, 0, num), num, num), token_ids=ids, media=media)
