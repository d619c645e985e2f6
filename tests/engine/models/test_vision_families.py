"""Small random models that read images, against transformers' own code."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.device import DEVICE
from support.engine.runner_driver import Driver, Walker
from support.engine.vision_models import (
    VISION_MODELS,
    Prompt,
    expected_logits,
    prompt_of,
    random_image,
    read_frames,
    read_qwen_frames,
    saved_vision_model,
)
from support.examples import examples
from support.faults import has_param

from agentflow.engine.media_run import PreparedMedium, rope_positions
from agentflow.engine.models.families.registry import FAMILIES
from agentflow.engine.models.memory_need import memory_need
from agentflow.engine.models.torch_runner import TorchRunner
from agentflow.engine.models.vision.loading import TOWERS
from agentflow.engine.store.native_architectures import IMAGE_ARCHITECTURES
from agentflow.errors import BadArgument, BadModelFolder

pytestmark = pytest.mark.gpu
SIZES = [(70, 50), (130, 191), (300, 40), (64, 64), (33, 257)]


class Case:
    """A model by transformers, and a driver of its runner."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.model = saved_vision_model(name, folder)
        self.runner = TorchRunner(folder, num_slots=6000, device=DEVICE, dtype="float32")
        self._wholes: dict[float, torch.Tensor] = {}

    def whole(self, medium: PreparedMedium, slice_flops: float) -> torch.Tensor:
        """The features of the one image that this is asked for, made without a pause."""
        if slice_flops not in self._wholes:
            self._wholes[slice_flops] = features(self, medium, [10**6], slice_flops)
        return self._wholes[slice_flops]

    def prompt(self, sizes: Sequence[tuple[int, int]], seed: int = 0) -> Prompt:
        made = VISION_MODELS[self.name]
        images = [random_image(*size, seed=seed + i) for i, size in enumerate(sizes)]
        return prompt_of(made.read(made.settings, images), seed)

    def encode(self, prompt: Prompt) -> None:
        for reading in prompt.readings:
            encoding = self.runner.encode_medium(reading.medium)
            encoding.run(encoding.num_slices)


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Returns the case of a model, which is made once."""
    return functools.cache(lambda name: Case(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module", params=VISION_MODELS)
def case(request: pytest.FixtureRequest, case_of: Callable[[str], Case]) -> Case:
    return case_of(request.param)


def computed(driver: Driver, walkers: Sequence[Walker], max_chunk: int) -> list[list[float]]:
    """The log-probability of each walker's wanted tokens (``targets``) after each of its tokens, in one batch
    and random chunks, which do not end inside of runs whose tokens see each other."""
    found: list[list[float]] = [[] for _ in walkers]
    while left := [w for w in walkers if w.num_computed < len(w.tokens)]:
        work = []
        for walker in left:
            end = min(len(walker.tokens), walker.num_computed + int(driver.rng.integers(1, max_chunk)))
            inside = [run for run in walker.media if run.sees_all and run.start < end < run.end]
            work.append((walker, (inside[0].end if inside else end) - walker.num_computed))
        for walker, part in driver.score(work, {id(w): targets_of(w) for w in left}):
            found[walkers.index(walker)] += part
    return found


def targets_of(walker: Walker) -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(walker.tokens)).integers(0, 320, len(walker.tokens))


def assert_likely(
    model: Any, prompt: Prompt, walker: Walker, logprobs: Sequence[float], **arguments: torch.Tensor
) -> None:
    logits = expected_logits(model, prompt, **arguments)
    targets = torch.from_numpy(targets_of(walker)).unsqueeze(1)
    exact = torch.log_softmax(logits, -1).gather(1, targets).squeeze(1)[-len(logprobs) :]
    scale = float(logits.abs().max())
    np.testing.assert_allclose(logprobs, exact, atol=1e-4 * scale, rtol=0)


def walker_of(driver: Driver, prompt: Prompt, **shared: Any) -> Walker:
    walker = driver.add(prompt.tokens, **shared)
    walker.media = prompt.media
    return walker


def test_every_token_is_as_likely_as_in_transformers(case: Case) -> None:
    """Texts with 1, 2, 5 and no images in one batch, in chunks."""
    driver = Driver(case.runner)
    prompts = [case.prompt(SIZES[:1]), case.prompt(SIZES[1:3], 1), case.prompt(SIZES, 2), case.prompt([], 3)]
    for prompt in prompts:
        case.encode(prompt)
    walkers = [walker_of(driver, prompt) for prompt in prompts]
    for prompt, walker, found in zip(prompts, walkers, computed(driver, walkers, 90), strict=True):
        assert_likely(case.model, prompt, walker, found)


def test_text_after_cached_images(case: Case) -> None:
    """Two continuations of one prefix with an image, whose features are dropped."""
    driver = Driver(case.runner)
    prompt = case.prompt(SIZES[1:2], 5)
    case.encode(prompt)
    first = walker_of(driver, prompt)
    computed(driver, [first], 4000)
    case.runner.drop_medium(prompt.readings[0].medium.identity)
    branches = []
    for seed in (1, 2):
        more = np.random.default_rng(seed).integers(10, 290, 20).tolist()
        longer = Prompt(prompt.tokens + more, prompt.ids + more, prompt.media, prompt.readings)
        branches.append((longer, walker_of(driver, longer, prefix_of=first, shared=len(prompt.tokens))))
    for (longer, walker), found in zip(
        branches, computed(driver, [walker for _, walker in branches], 6), strict=True
    ):
        assert len(found) == 20
        assert_likely(case.model, longer, walker, found)


def test_generated_tokens(case: Case) -> None:
    """Greedy tokens of two requests, next to one without images."""
    driver = Driver(case.runner)
    prompts = [case.prompt(SIZES[2:4], 7), case.prompt([], 8)]
    case.encode(prompts[0])
    walkers = [walker_of(driver, prompt) for prompt in prompts]
    driver.generate(walkers, 8)
    for prompt, walker in zip(prompts, walkers, strict=True):
        longer = Prompt(walker.tokens, prompt.ids + walker.generated, prompt.media, prompt.readings)
        logits = expected_logits(case.model, longer)[len(prompt.ids) - 1 : -1]
        assert walker.generated == logits.argmax(-1).tolist()


@pytest.mark.parametrize("num_frames", [1, 8, 32])
@pytest.mark.parametrize(
    ("name", "of_frame", "at_end"), [("llava_next_video", 9, 0), ("llava_onevision", 16, 1)]
)
def test_videos(
    name: str, of_frame: int, at_end: int, num_frames: int, case_of: Callable[[str], Case]
) -> None:
    """Two videos of different lengths and an image between them."""
    check_videos(
        case_of(name), [read_frames(of_frame * num_frames + at_end, num_frames, seed) for seed in (1, 2)], 200
    )


def check_videos(case: Case, videos: Sequence[Any], max_chunk: int) -> None:
    """A prompt of two videos with a picture between them."""
    (image,) = case.prompt(SIZES[1:2]).readings
    prompt = prompt_of([videos[0], image, videos[1]])
    case.encode(prompt)
    driver = Driver(case.runner)
    walker = walker_of(driver, prompt)
    (found,) = computed(driver, [walker], max_chunk)
    assert_likely(case.model, prompt, walker, found)


@pytest.mark.parametrize(("name", "patch"), [("qwen2_5_vl", 14), ("qwen3_vl", 16)])
def test_videos_with_times(name: str, patch: int, case_of: Callable[[str], Case]) -> None:
    videos = [read_qwen_frames(patch, is_divided=name == "qwen3_vl", seed=seed) for seed in (1, 2)]
    check_videos(case_of(name), videos, 40)


@pytest.mark.parametrize("is_divided", [False, True])
def test_text_after_a_clip_of_more_times_than_rows(is_divided: bool, case_of: Callable[[str], Case]) -> None:
    """transformers 5.23 lets text continue after the rows and columns of a clip, at positions that its later
    frames have, too. It gets the positions of the authors' code, which continue after all frames."""
    name, patch = ("qwen3_vl", 16) if is_divided else ("qwen2_5_vl", 14)
    case = case_of(name)
    videos = [read_qwen_frames(patch, is_divided=is_divided, seed=seed, num_times=9) for seed in (1, 2)]
    prompt = prompt_of(videos)
    case.encode(prompt)
    driver = Driver(case.runner)
    walker = walker_of(driver, prompt)
    (found,) = computed(driver, [walker], 40)
    positions = torch.from_numpy(rope_positions(len(prompt.tokens), prompt.media)[:, :-1])
    assert_likely(case.model, prompt, walker, found, position_ids=positions.unsqueeze(1))


def features(case: Case, medium: PreparedMedium, cuts: Sequence[int], slice_flops: float) -> torch.Tensor:
    """Encoded in slices of these numbers, over and over."""
    media = case.runner.media
    assert media is not None
    with pytest.MonkeyPatch.context() as patch:  # other tests have slices of the usual size
        patch.setattr(media, "slice_flops", slice_flops)
        encoding = case.runner.encode_medium(medium)
        total, done = encoding.num_slices, 0
        assert total > 3
        assert encoding.flops_per_slice > 0
        while encoding.num_slices:
            encoding.run(cuts[done % len(cuts)])
            done += 1
    found = media._features[medium.identity]
    case.runner.drop_medium(medium.identity)
    return torch.cat([found.rows, *([] if found.deep is None else found.deep)])


@examples(20)
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5), slice_flops=st.sampled_from([2e4, 3e5, 1e7]))
def test_slices_give_what_the_whole_gives(case: Case, cuts: list[int], slice_flops: float) -> None:
    (reading,) = case.prompt([(130, 70)]).readings
    sliced = features(case, reading.medium, cuts, slice_flops)
    assert torch.equal(sliced, case.whole(reading.medium, slice_flops))
    undivided = case.whole(reading.medium, 1e12)
    torch.testing.assert_close(sliced, undivided, rtol=1e-4, atol=1e-4 * float(undivided.abs().max()))
    assert case.runner.feature_bytes(reading.medium) == sliced.nbytes


def test_no_slice_has_the_products_of_several(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding patches and making tokens are divided, too: a step of the engine waits for a slice."""
    media = case.runner.media
    assert media is not None
    slice_flops = 2e6 if case.name.startswith("qwen") else 3e5  # at least a line of patches
    monkeypatch.setattr(media, "slice_flops", slice_flops)
    linear: Any = media.tower.encoder._kernels.linear
    done, is_inside = 0.0, False

    def counting(product: Callable[..., Any], weight_at: int) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal done, is_inside
            if is_inside:  # some products are made of others
                return product(*arguments, **options)
            num_outputs, num_inputs = arguments[weight_at].shape
            done += 2 * len(arguments[weight_at - 1]) * num_outputs * num_inputs
            is_inside = True
            try:
                return product(*arguments, **options)
            finally:
                is_inside = False

        return counted

    for name, weight_at in [("multiply", 1), ("add_product", 2)]:
        monkeypatch.setattr(linear, name, counting(getattr(linear, name), weight_at))
    (reading,) = case.prompt([(230, 170)]).readings
    encoding = case.runner.encode_medium(reading.medium)
    work = []
    while encoding.num_slices:
        before = done
        encoding.run(1)
        work.append(done - before)
    case.runner.drop_medium(reading.medium.identity)
    assert max(work) <= 1.6 * slice_flops
    assert sum(work) <= len(work) * encoding.flops_per_slice


def test_memory_counts_the_tower(case: Case) -> None:
    need = memory_need("", case.folder, "float32", None)
    assert need.kv_bytes_per_token == case.runner.info.kv_bytes_per_token
    assert case.runner.info.reads_media
    media = case.runner.media
    assert media is not None
    assert media.tower.nbytes > 0
    assert case.runner.info.weight_bytes <= 1.5 * need.weight_bytes


def test_a_tower_stays_dense_beside_quantised_text(case: Case) -> None:
    """``memory_need`` counts a dense tower."""
    media = case.runner.media
    assert media is not None
    dense, int8 = (memory_need("", case.folder, "bfloat16", None, quantize) for quantize in (None, "int8"))
    assert dense.weight_bytes > int8.weight_bytes > media.tower.nbytes / 2  # in bfloat16


def test_models_that_read_images_are_known_without_torch() -> None:
    assert TOWERS.keys() == IMAGE_ARCHITECTURES
    assert FAMILIES.keys() >= IMAGE_ARCHITECTURES


@pytest.mark.parametrize("shape", [(1, 3, 5, 5), (2, 2), None])
def test_arrays_of_another_model_are_refused(case: Case, shape: tuple[int, ...] | None) -> None:
    arrays = {} if shape is None else {"pixels": np.zeros(shape, np.uint8)}
    with pytest.raises(BadArgument):
        case.runner.encode_medium(PreparedMedium("0", arrays, ()))


def test_an_image_that_no_step_can_compute_is_rejected(tmp_path: Path) -> None:
    """All tokens of an image of Gemma 3 attend to each other."""
    saved_vision_model("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["image_size"], config["mm_tokens_per_image"] = 33 * 7, 33 * 33
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModelFolder, check=has_param("mm_tokens_per_image")):
        TorchRunner(tmp_path, num_slots=100, device="cpu", dtype="float32")
