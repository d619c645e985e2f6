"""Models with vision in two GGUF files, against the same from safetensors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.engine.gguf_vision import write_gguf_files
from support.engine.runner_driver import Driver
from support.engine.vision_models import VISION_MODELS, prompt_of, random_image, saved_vision_model

from agentflow.engine.media.processors.registry import PROCESSORS
from agentflow.engine.media.settings import read_media_settings
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.store.gguf.names import find_mmproj

NAMES = ("idefics3", "llava", "llava_next", "gemma3", "qwen2_5_vl", "qwen3_vl")
SIZES = [(130, 191), (300, 40)]
# llama.cpp's assumption, because files cannot contain it.
GEMMA_TEXT = {"query_pre_attn_scalar": 16, "layer_types": None, "_sliding_window_pattern": 6}


def save(name: str, tmp_path: Path, **options: Any) -> tuple[Path, Path]:
    """The model as a folder, and its GGUF file with the projector file next to it."""
    folder, files = tmp_path / "folder", tmp_path / "files"
    files.mkdir()
    saved_vision_model(name, folder, GEMMA_TEXT if name == "gemma3" else None)
    return folder, write_gguf_files(folder, files, **options)


def logprobs(path: Path, name: str) -> NDArray[np.float32]:
    """The log-probabilities of random tokens after each token of a prompt with two images."""
    runner = TorchRunner(path, num_slots=2000, device="cpu", dtype="float32")
    made = VISION_MODELS[name]
    images = [random_image(*size, seed=i) for i, size in enumerate(SIZES)]
    prompt = prompt_of(made.read(made.settings, images))
    for reading in prompt.readings:
        encoding = runner.encode_medium(reading.medium)
        encoding.run(encoding.num_slices)
    driver = Driver(runner)
    walker = driver.add(prompt.tokens)
    walker.media = prompt.media
    rows = np.arange(len(prompt.tokens))
    targets = np.random.default_rng(5).integers(10, 320, len(rows))
    output = driver.step([(walker, len(rows))], rows=rows, target_ids=targets, needs_logprobs=True)
    assert output.logprobs is not None
    return output.logprobs


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_as_likely(name: str, tmp_path: Path) -> None:
    folder, path = save(name, tmp_path)
    np.testing.assert_allclose(logprobs(path, name), logprobs(folder, name), atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_images_are_prepared_alike(name: str, tmp_path: Path) -> None:
    folder, path = save(name, tmp_path)
    image = random_image(300, 140)
    made = []
    for settings in (read_media_settings(path), read_media_settings(folder)):
        made.append((settings.scaling, PROCESSORS[settings.family](settings).prepare_image(image)))
    (scaling, one), (wanted, other) = made
    assert scaling.factor == wanted.factor
    assert scaling.mean == pytest.approx(wanted.mean)
    assert scaling.std == pytest.approx(wanted.std)
    assert one.arrays.keys() == other.arrays.keys()
    assert all((one.arrays[key] == other.arrays[key]).all() for key in one.arrays)
    assert len(one.pieces) == len(other.pieces)


@pytest.mark.parametrize(
    "changes",
    [
        {"clip.projector_type": "resampler"},
        {"clip.vision.projection_dim": 99},
        {"clip.vision.image_size": "wide"},
    ],
)
def test_a_projector_that_does_not_fit_is_left_out(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, path = save("idefics3", tmp_path, changes=changes)
    with caplog.at_level(logging.WARNING, "agentflow"):
        runner = TorchRunner(path, num_slots=100, device="cpu", dtype="float32")
    assert not runner.info.reads_media
    assert [record for record in caplog.records if "mmproj-model-f32.gguf" in record.getMessage()]


@pytest.mark.parametrize(
    ("model", "files", "found"),
    [
        ("tiny-Q4_K_M.gguf", ["mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("tiny-Q4_K_M.gguf", ["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-Q8_0.gguf"], "mmproj-BF16.gguf"),
        (
            "tiny-2b-Q8_0.gguf",
            ["mmproj-other-f16.gguf", "tiny-2b.mmproj-f16.gguf"],
            "tiny-2b.mmproj-f16.gguf",
        ),
        ("tiny-2b-Q8_0.gguf", ["mmproj-f16.gguf", "mmproj-tiny-2b-Q8_0.gguf"], "mmproj-tiny-2b-Q8_0.gguf"),
        ("tiny.gguf", ["mmproj-other-f16.gguf", "other.gguf"], None),
    ],
)
def test_the_projector_of_a_model(model: str, files: list[str], found: str | None, tmp_path: Path) -> None:
    for name in (model, *files):
        (tmp_path / name).touch()
    projector = find_mmproj(tmp_path / model)
    assert (None if projector is None else projector.name) == found
