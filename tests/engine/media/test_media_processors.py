"""Processors of media against transformers: equal bytes of pixels, equal ids of prompts, equal positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.examples import examples
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor as TheirGemma3
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor as TheirIdefics3
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor as TheirLlava
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor as TheirLlavaNext
from transformers.models.llava_next_video.processing_llava_next_video import LlavaNextVideoProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import (
    LlavaOnevisionProcessor as TheirOnevision,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniPreTrainedModelForConditionalGeneration,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm

from agentflow.engine.media.processors.pixels import Clip, Prepared, Processor, vision_config
from agentflow.engine.media.processors.registry import PROCESSORS
from agentflow.engine.media.settings import MediaSettings
from agentflow.engine.media_run import MediaPiece, MediaRun, rope_positions
from agentflow.errors import BadArgument, BadModelFolder, NotSupported

pytestmark = pytest.mark.timeout(300)

_MARKUP = [
    "<image>",
    "<video>",
    "<fake_token_around_image>",
    "<global-img>",
    *[f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)],
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
]
SIZES = st.tuples(st.integers(1, 90), st.integers(1, 90))


def _tokenizer(**names: str) -> PreTrainedTokenizerFast:
    bytes_alone = tokenizers.pre_tokenizers.ByteLevel
    vocab = {char: index for index, char in enumerate(sorted(bytes_alone.alphabet()))}
    # Two line ends are one token, as in the vocabularies of these models.
    vocab["ĊĊ"] = len(vocab)
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    model.pre_tokenizer = bytes_alone(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, additional_special_tokens=_MARKUP)
    for name, text in names.items():
        setattr(tokenizer, name, text)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(text))
    return tokenizer


def _without_video_processor(kind: type) -> Any:
    """The class, which here gets no video processor: theirs need a package that is not installed."""
    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, value: None})


class Family:
    """One family: our processor, theirs, and the name of the token that stands for features."""

    def __init__(
        self,
        model: dict[str, Any],
        image_processor: Any,
        make: Callable[[Any, PreTrainedTokenizerFast], Any],
        token: str,
        **names: str,
    ) -> None:
        self.image_processor = image_processor
        configured = image_processor.to_dict()
        # Their processor of Gemma 3 has class options that override the options of the files.
        names_of_pan = [name for name in configured if "pan_and_scan" in name]
        self.call_options = {name: configured[name] for name in names_of_pan if configured[name]}
        self.settings = MediaSettings(model, configured, {}, {})
        self.ours: Processor = PROCESSORS[model["model_type"]](self.settings)
        self.tokenizer = _tokenizer(**names)
        self.theirs = make(image_processor, self.tokenizer)
        self.token_id = self.tokenizer.convert_tokens_to_ids(token)

    def ids(self, text: str, prepared: list[Prepared]) -> list[int]:
        """The ids of a text whose placeholders are expanded by us."""
        first, *rest = text.split(self.ours.image_token)
        pieces: list[str | MediaPiece] = [first]
        for one, after in zip(prepared, rest, strict=True):
            pieces += [*one.pieces, after]
        found: list[int] = []
        markup = ""
        for piece in [*pieces, None]:
            if isinstance(piece, str):
                markup += piece  # one encoding up to the next run
                continue
            found += self.tokenizer.encode(markup, add_special_tokens=False)
            markup = ""
            if piece is not None:
                found += [self.token_id] * len(piece.positions[0])
        return found


CLIP_VISION = {"model_type": "clip_vision_model", "patch_size": 7, "image_size": 28}
SIGLIP_VISION = {"model_type": "siglip_vision_model", "patch_size": 7, "image_size": 28}
PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
ALL_PINPOINTS = [[height, width] for height in range(28, 141, 28) for width in range(28, 141, 28)]
CLIP_SQUARE = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
DEFAULT_CLIP = {
    "patch_size": 7,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
QWEN_VISION = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2}
QWEN_SIZE = {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 4_096}}


def _idefics3(**options: Any) -> Family:
    model = {"model_type": "smolvlm", "scale_factor": 2, "vision_config": {"patch_size": 4}}
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 16}, **options
    )
    return Family(model, images, lambda i, t: TheirIdefics3(i, t, image_seq_len=4), "<image>")


def _llava(image_processor: Any, vision: dict[str, Any], *, old: bool = False, **options: Any) -> Family:
    strategy = options["vision_feature_select_strategy"]
    model = {"model_type": "llava", "vision_config": vision, "vision_feature_select_strategy": strategy}
    family = Family(model, image_processor, lambda i, t: TheirLlava(i, t, **options), "<image>")
    if old:
        family.ours = PROCESSORS["llava"](MediaSettings(model, {"size": 28, "crop_size": 28}, {}, {}))
    return family


def _llava_next(model_type: str = "llava_next") -> Family:
    model = {"model_type": model_type, "vision_config": CLIP_VISION}
    images = LlavaNextImageProcessorPil(image_grid_pinpoints=PINPOINTS, **CLIP_SQUARE)
    if model_type == "llava_next":
        return Family(model, images, lambda i, t: TheirLlavaNext(i, t, **DEFAULT_CLIP), "<image>")
    kind = _without_video_processor(LlavaNextVideoProcessor)
    return Family(model, images, lambda i, t: kind(None, i, t, **DEFAULT_CLIP), "<image>")


def _onevision(ratio: str = "anyres_max_9") -> Family:
    model = {
        "model_type": "llava_onevision",
        "vision_config": SIGLIP_VISION,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": ratio,
    }
    images = LlavaOnevisionImageProcessorPil(
        size={"height": 28, "width": 28}, image_grid_pinpoints=ALL_PINPOINTS
    )
    kind = _without_video_processor(TheirOnevision)
    options = {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": ratio}
    return Family(model, images, lambda i, t: kind(i, t, None, **options), "<image>")


def _gemma3(**options: Any) -> Family:
    model = {"model_type": "gemma3", "mm_tokens_per_image": 5, "vision_config": SIGLIP_VISION}
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, **options)
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    return Family(
        model, images, lambda i, t: TheirGemma3(i, t, image_seq_length=5), "<image_soft_token>", **names
    )


def _qwen(model_type: str, kind: type) -> Family:
    model = {"model_type": model_type, "vision_config": QWEN_VISION}
    made = _without_video_processor(kind)
    images = Qwen2VLImageProcessorPil(**QWEN_SIZE)
    return Family(model, images, lambda i, t: made(i, t, None), "<|image_pad|>")


FAMILIES: dict[str, Callable[[], Family]] = {
    "idefics3": _idefics3,
    "idefics3 without splitting": lambda: _idefics3(do_image_splitting=False),
    "llava": lambda: _llava(CLIPImageProcessorPil(**CLIP_SQUARE), CLIP_VISION, **DEFAULT_CLIP),
    "llava with padding": lambda: _llava(
        LlavaImageProcessorPil(do_pad=True, **CLIP_SQUARE), CLIP_VISION, **DEFAULT_CLIP
    ),
    "llava with sizes of old files": lambda: _llava(
        CLIPImageProcessorPil(size=28, crop_size=28), CLIP_VISION, old=True, **DEFAULT_CLIP
    ),
    "llava with a crop that is larger": lambda: _llava(
        CLIPImageProcessorPil(size={"shortest_edge": 23}, crop_size={"height": 28, "width": 28}),
        CLIP_VISION,
        **DEFAULT_CLIP,
    ),
    "llava with siglip": lambda: _llava(
        SiglipImageProcessorPil(size={"height": 28, "width": 28}),
        SIGLIP_VISION,
        patch_size=7,
        vision_feature_select_strategy="full",
    ),
    "llava_next": _llava_next,
    "llava_next_video": lambda: _llava_next("llava_next_video"),
    "llava_onevision": _onevision,
    "llava_onevision with fewer features": lambda: _onevision("anyres_max_2"),
    "gemma3": _gemma3,
    "gemma3 with pan and scan": lambda: _gemma3(
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=16,
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
    ),
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl", Qwen2_5_VLProcessor),
    "qwen3_vl": lambda: _qwen("qwen3_vl", Qwen3VLProcessor),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]()


def _image(size: tuple[int, int], seed: int = 0) -> Image.Image:
    height, width = size
    noise = np.random.default_rng([seed, height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def _their_tiles(processor: Any, image: Image.Image, **options: Any) -> np.ndarray[Any, Any]:
    values = processor(image, do_rescale=False, do_normalize=False, **options)["pixel_values"]
    first = values[0] if isinstance(values, list) else values
    if isinstance(values, list) and first.ndim == 3:
        first = np.stack(values)
    while first.ndim > 4:
        first = first[0]
    return first


def _patches(pixels: np.ndarray[Any, Any], patch: int, merge: int, times: int) -> np.ndarray[Any, Any]:
    """Qwen's order of patches, by loops."""
    _, _, height, width = pixels.shape
    found = []
    unit = patch * merge
    for y in range(0, height, unit):
        for x in range(0, width, unit):
            for row in range(merge):
                for column in range(merge):
                    top, left = y + row * patch, x + column * patch
                    one = pixels[0, :, top : top + patch, left : left + patch]
                    found.append(np.repeat(one[:, None], times, axis=1).reshape(-1))
    return np.array(found)


@examples(60)
@given(size=SIZES)
def test_the_bytes_are_those_of_transformers(family: Family, size: tuple[int, int]) -> None:
    image = _image(size)
    try:
        ours = family.ours.prepare_image(image)
    except BadArgument:
        with pytest.raises(ValueError, match="aspect ratio"):
            _their_tiles(family.image_processor, image)
        return
    theirs = _their_tiles(family.image_processor, image)
    pixels = ours.arrays["pixels"]
    assert pixels.dtype == np.uint8
    if "grid" in ours.arrays:
        pixels = _patches(pixels, 4, 2, 2)
        grid = family.image_processor(image)["image_grid_thw"]
        assert ours.arrays["grid"].tolist() == np.asarray(grid)[0].tolist()
    np.testing.assert_array_equal(pixels, theirs)


def test_scaled_bytes_are_the_values_of_transformers(family: Family) -> None:
    image = _image((30, 50))
    bytes_alone = _their_tiles(family.image_processor, image)
    theirs = family.image_processor(image)["pixel_values"]
    scaling = family.settings.scaling
    mean, std = (np.array(values, dtype=np.float32) for values in (scaling.mean, scaling.std))
    if family.settings.family.startswith("qwen"):
        channels = (bytes_alone.shape[0], 3, -1)
        bytes_alone, theirs = bytes_alone.reshape(channels), np.asarray(theirs).reshape(channels)
        shape: tuple[int, ...] = (1, 3, 1)
    else:
        shape = (1, 3, 1, 1)
    ours = (bytes_alone.astype(np.float32) * scaling.factor - mean.reshape(shape)) / std.reshape(shape)
    np.testing.assert_allclose(ours, np.asarray(theirs).reshape(ours.shape), rtol=1e-5, atol=1e-6)


def test_scaling_has_the_defaults_of_transformers(family: Family) -> None:
    defaults = type(family.image_processor)()
    kind = {"image_processor_type": type(defaults).__name__.removesuffix("Pil")}
    scaling = MediaSettings(family.settings.model, kind, {}, {}).scaling
    assert scaling.factor == defaults.rescale_factor
    assert (list(scaling.mean), list(scaling.std)) == (list(defaults.image_mean), list(defaults.image_std))


@examples(100)
@given(sizes=st.lists(SIZES, min_size=1, max_size=3), glue=st.sampled_from(["", "a", "\n", " b\n"]))
def test_the_ids_of_a_prompt_are_those_of_transformers(
    family: Family, sizes: list[tuple[int, int]], glue: str
) -> None:
    images = [_image(size, seed) for seed, size in enumerate(sizes)]
    token = family.ours.image_token
    text = "x" + glue + (glue + token) * len(images) + glue + "y"
    try:
        prepared = [family.ours.prepare_image(image) for image in images]
    except BadArgument:
        return
    theirs = family.theirs(text=text, images=images, images_kwargs=family.call_options)["input_ids"]
    assert family.ids(text, prepared) == np.asarray(theirs).reshape(-1).tolist()


@examples(40)
@given(size=SIZES)
def test_runs_cover_the_features_in_order(family: Family, size: tuple[int, int]) -> None:
    try:
        pieces = family.ours.prepare_image(_image(size)).pieces
    except BadArgument:
        return
    done = 0
    for piece in pieces:
        if isinstance(piece, MediaPiece):
            assert piece.first == done
            assert piece.sees_all == (family.settings.family == "gemma3")
            done += len(piece.positions[0])
    assert done


def _runs(prepared: Prepared, start: int) -> list[MediaRun]:
    """The runs of a medium without markup."""
    (piece,) = prepared.pieces
    assert isinstance(piece, MediaPiece)
    return [MediaRun("x", start, piece.positions, piece.first)]


@examples(40)
@given(sizes=st.lists(SIZES, min_size=1, max_size=2), before=st.integers(1, 5), between=st.integers(1, 5))
def test_positions_of_qwen_are_those_of_transformers(
    sizes: list[tuple[int, int]], before: int, between: int
) -> None:
    ours = _qwen("qwen2_5_vl", Qwen2_5_VLProcessor).ours
    try:
        prepared = [ours.prepare_image(_image(size)) for size in sizes]
    except BadArgument:
        return
    kinds = [0] * before
    runs: list[MediaRun] = []
    for one in prepared:
        runs += _runs(one, len(kinds))
        kinds += [1] * runs[-1].num_tokens + [0] * between
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = Qwen2_5_VLModel.get_vision_position_ids.__get__(model)
    theirs, _ = Qwen2_5_VLModel.get_rope_index(
        model,
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds]),
        image_grid_thw=torch.tensor(np.stack([one.arrays["grid"] for one in prepared])),
    )
    np.testing.assert_array_equal(rope_positions(len(kinds), runs)[:, :-1], theirs[:, 0].numpy())


@pytest.mark.parametrize(
    ("name", "settings_of_video", "counts"),
    [
        # The numbers of frames for clips of 1, 100 and 3000 frames with 10 a second.
        ("llava_next_video", {}, [1, 8, 8]),
        ("llava_next_video", {"num_frames": 16}, [1, 16, 16]),
        ("llava_onevision", {}, [1, 32, 32]),
        ("smolvlm", {}, [1, 10, 64]),
        ("smolvlm", {"video_sampling": {"fps": 2, "max_frames": 24}}, [1, 20, 24]),
        ("qwen2_5_vl", {}, [1, 20, 600]),
        ("qwen2_5_vl", {"fps": 0.55}, [1, 4, 164]),
        ("qwen3_vl", {"max_frames": 99}, [1, 20, 99]),
    ],
)
def test_a_family_chooses_the_number_of_frames(
    name: str, settings_of_video: dict[str, Any], counts: list[int]
) -> None:
    like = {"smolvlm": "idefics3"}
    given = FAMILIES[like.get(name, name)]().settings
    sampling = PROCESSORS[name](
        MediaSettings(
            {**given.model, "model_type": name},
            given.image,
            {**given.image, **settings_of_video} if settings_of_video else {},
            given.prompt,
        )
    ).sampling
    assert [sampling.count(total, total / 10) for total in (1, 100, 3000)] == counts


@pytest.mark.parametrize("kind", PROCESSORS)
def test_f37_a_config_without_the_size_of_patches_has_the_towers_default(kind: str) -> None:
    tower = AutoConfig.for_model(kind, vision_config={}).vision_config
    settings = MediaSettings({"model_type": kind, "vision_config": {}}, {}, {}, {})
    assert vision_config(settings).integer("patch_size") == tower.patch_size


def _clip(count: int, size: tuple[int, int] = (40, 60)) -> Clip:
    frames = [_image(size, seed) for seed in range(count)]
    return Clip(frames, size, [index / 2 for index in range(count)], count / 2)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_pooled_frames_have_the_tokens_of_transformers(count: int) -> None:
    for family in (_llava_next("llava_next_video"), _onevision()):
        prepared = family.ours.prepare_video(_clip(count))
        pixels = prepared.arrays["pixels"]
        assert pixels.shape == (count, 3, 28, 28)
        told = family.theirs.replace_video_token({"pixel_values_videos": [pixels]}, 0)
        (piece,) = prepared.pieces
        assert isinstance(piece, MediaPiece)
        assert len(piece.positions[0]) == told.count("<video>")


def test_a_frame_is_processed_like_an_image() -> None:
    family = _llava(CLIPImageProcessorPil(**CLIP_SQUARE), CLIP_VISION, **DEFAULT_CLIP)
    video = _llava_next("llava_next_video").ours.prepare_video(_clip(2))
    for seed in range(2):
        theirs = _their_tiles(family.image_processor, _image((40, 60), seed))
        np.testing.assert_array_equal(video.arrays["pixels"][seed], theirs[0])


@pytest.mark.parametrize("count", [1, 4, 7])
def test_frames_of_qwen_have_times(count: int) -> None:
    prepared = _qwen("qwen2_5_vl", Qwen2_5_VLProcessor).ours.prepare_video(_clip(count))
    times, rows, columns = prepared.arrays["grid"].tolist()
    assert times == (count + 1) // 2
    assert prepared.arrays["pixels"].shape == (times * 2, 3, rows * 4, columns * 4)
    (run,) = _runs(prepared, 0)
    model = SimpleNamespace()
    theirs = Qwen2_5_VLModel.get_vision_position_ids(
        model, 0, torch.tensor([times, rows, columns]), 1, 2, torch.tensor(2 * 2 / 2.0)
    )
    np.testing.assert_array_equal(run.positions, theirs.numpy())


@pytest.mark.parametrize("count", [2, 8, 32])
def test_text_continues_after_all_frames_of_a_clip(count: int) -> None:
    """As in transformers' Qwen2.5-Omni, which has the rotary positions of Qwen2.5-VL: after the largest
    position, also if that is a time."""
    prepared = _qwen("qwen2_5_vl", Qwen2_5_VLProcessor).ours.prepare_video(_clip(count))
    (run,) = _runs(prepared, 4)
    video, start, end = 3, 1, 2
    ids = [9, 9, 9, start, *[video] * run.num_tokens, end, 9, 9]
    special = {"image_token_id": 4, "video_token_id": video, "audio_token_id": 5, "audio_start_token_id": 6}
    timing = {"position_id_per_seconds": 2, "seconds_per_chunk": 2, "vision_start_token_id": start}
    model = SimpleNamespace(spatial_merge_size=2, config=SimpleNamespace(**special, **timing))
    model.get_llm_pos_ids_for_vision = partial(
        Qwen2_5OmniPreTrainedModelForConditionalGeneration.get_llm_pos_ids_for_vision, model
    )
    theirs, deltas = Qwen2_5OmniPreTrainedModelForConditionalGeneration.get_rope_index(
        model,
        torch.tensor([ids]),
        video_grid_thw=torch.tensor(prepared.arrays["grid"][None]),
        second_per_grids=torch.tensor([1.0]),  # two frames of half a second
    )
    ours = rope_positions(len(ids), [run])
    np.testing.assert_array_equal(ours[:, :-1], theirs[:, 0].numpy())
    assert ours[0, -1] == len(ids) + deltas.item()  # of the first generated token


@pytest.mark.parametrize("count", [2, 5])
def test_frames_of_qwen3_stand_behind_their_seconds(count: int) -> None:
    family = _qwen("qwen3_vl", Qwen3VLProcessor)
    family.theirs.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    prepared = family.ours.prepare_video(_clip(count))
    metadata = SimpleNamespace(fps=2.0, frames_indices=list(range(count)))
    grid = prepared.arrays["grid"]
    told = family.theirs.replace_video_token({"video_grid_thw": grid[None], "video_metadata": [metadata]}, 0)
    ours = ""
    for piece in prepared.pieces:
        ours += piece if isinstance(piece, str) else "<|video_pad|>" * len(piece.positions[0])
    assert ours == told


@pytest.mark.parametrize("count", [1, 3])
def test_frames_of_smolvlm_stand_behind_their_times(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    family = _idefics3(do_image_splitting=False)
    monkeypatch.setattr(processing_smolvlm, "num2words", {1: "one", 3: "three"}.__getitem__)
    clip = _clip(count)
    times = [70.0 * index for index in range(count)]
    prepared = family.ours.prepare_video(replace(clip, times_s=times, duration_s=3_723.4))
    pixels = prepared.arrays["pixels"]
    metadata = SimpleNamespace(fps=1.0, timestamps=times, duration=3_723.4)
    names = SimpleNamespace(
        image_seq_len=4,
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
    )
    inputs = {"pixel_values": pixels[None], "video_metadata": [metadata]}
    told = processing_smolvlm.SmolVLMProcessor.replace_video_token(names, inputs, 0)
    ours = ""
    for piece in prepared.pieces:
        ours += piece if isinstance(piece, str) else "<image>" * len(piece.positions[0])
    assert ours == told
    for seed in range(count):  # a frame is an image that is not split
        theirs = _their_tiles(family.image_processor, _image((40, 60), seed))
        np.testing.assert_array_equal(pixels[seed], theirs[0])


@pytest.mark.parametrize(
    ("model_type", "image", "error"),
    [
        ("gemma3", {"do_resize": False}, NotSupported),
        ("llava_next", {"image_grid_pinpoints": [[300, 300]]}, BadModelFolder),
        ("llava", {"size": {"shortest_edge": "wide"}}, BadModelFolder),
        ("llava_onevision", {"size": {"height": 28, "width": 56}}, BadModelFolder),
    ],
)
def test_settings_that_cannot_be_used_are_rejected(
    model_type: str, image: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        PROCESSORS[model_type](MediaSettings({"model_type": model_type}, image, {}, {}))


def test_a_told_number_of_tokens_must_be_true() -> None:
    model = {"model_type": "smolvlm", "scale_factor": 2, "vision_config": {"patch_size": 4}}
    image = {"max_image_size": {"longest_edge": 16}}
    with pytest.raises(BadModelFolder):
        PROCESSORS["smolvlm"](MediaSettings(model, image, {}, {"image_seq_len": 5}))


def test_sides_that_are_too_unequal_are_rejected() -> None:
    image = Image.new("RGB", (30_000, 1))
    for name in ("llava", "qwen2_5_vl"):
        with pytest.raises(BadArgument) as raised:
            FAMILIES[name]().ours.prepare_image(image.resize((3_000_000, 1)))
        assert raised.value.param == "image"
