"""Small models that read images, with random weights, and the same images as transformers and as we read
them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from support.engine.family_models import SIZES

from agentflow.engine.media_run import MediaPiece, MediaRun, PreparedMedium, pseudo_tokens

IMAGE_TOKEN = 300
VIDEO_TOKEN = 301
TEXT = SIZES | {"max_position_embeddings": 2048}
TOWER = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}


@dataclass(frozen=True)
class Reading:
    """An image as we read it, and the arguments of transformers' model for it."""

    medium: PreparedMedium
    arguments: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class VisionModel:
    """``read``: prepares images. ``joined``: the arguments of several images for transformers."""

    kind: str
    config: Mapping[str, Any]
    settings: Mapping[str, Any]  # preprocessor_config.json
    read: Callable[[Mapping[str, Any], Sequence[Image.Image]], list[Reading]]


def random_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Colours that vary smoothly and at random."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    noisy = smooth + rng.integers(-20, 20, smooth.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def in_line(num_tokens: int, first: int = 0, *, sees_all: bool = False) -> MediaPiece:
    return MediaPiece(np.arange(num_tokens)[None], first, sees_all)


def medium_of(arrays: Mapping[str, NDArray[Any]], pieces: Sequence[str | MediaPiece]) -> PreparedMedium:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name}{arrays[name].shape}".encode() + arrays[name].tobytes())
    return PreparedMedium(digest.hexdigest(), arrays, tuple(pieces))


def bytes_and_numbers(
    processor: Any, images: Sequence[Image.Image], **options: Any
) -> tuple[NDArray[np.uint8], dict[str, torch.Tensor]]:
    """The pixels before scaling, and the output of transformers' processor."""
    plain = processor(images=images, do_rescale=False, do_normalize=False, **options)["pixel_values"]
    made = dict(processor(images=images, return_tensors="pt", **options))
    pixels = np.asarray(plain)
    assert (pixels == pixels.astype(np.uint8)).all()
    return pixels.astype(np.uint8), made


def read_idefics3(settings: Mapping[str, Any], images: Sequence[Image.Image]) -> list[Reading]:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    processor = Idefics3ImageProcessorPil(**settings)
    found = []
    for image in images:
        pixels, arguments = bytes_and_numbers(processor, [[image]])
        pieces: list[str | MediaPiece] = []
        for tile in range(pixels.shape[1]):
            pieces += ["between", in_line(16, 16 * tile)]
        # transformers drops tiles that are padding, so several images of different sizes are one long one.
        found.append(Reading(medium_of({"pixels": pixels[0]}, (*pieces, "after")), arguments))
    return found


def read_llava(settings: Mapping[str, Any], images: Sequence[Image.Image]) -> list[Reading]:
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    processor = LlavaImageProcessorPil(**settings)
    found = []
    for image in images:
        pixels, arguments = bytes_and_numbers(processor, [image])
        found.append(Reading(medium_of({"pixels": pixels}, ["before", in_line(49)]), arguments))
    return found


def read_gemma3(settings: Mapping[str, Any], images: Sequence[Image.Image]) -> list[Reading]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    processor = Gemma3ImageProcessorPil(**settings)
    found = []
    for image in images:
        pixels, arguments = bytes_and_numbers(processor, [image])
        arguments.pop("num_crops")
        pieces = ["before", in_line(16, sees_all=True), "after"]
        found.append(Reading(medium_of({"pixels": pixels}, pieces), arguments))
    return found


def read_any_resolution(settings: Mapping[str, Any], images: Sequence[Image.Image]) -> list[Reading]:
    """The number of tokens comes from transformers' features."""
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    given = dict(settings)
    is_onevision = given.pop("is_onevision", False)
    processor = (LlavaOnevisionImageProcessorPil if is_onevision else LlavaNextImageProcessorPil)(**given)
    found = []
    for image in images:
        pixels, arguments = bytes_and_numbers(processor, [image])
        arguments.pop("batch_num_images", None)
        # Like transformers' processors of text and images.
        kind = transformers.LlavaOnevisionProcessor if is_onevision else transformers.LlavaNextProcessor
        counting = SimpleNamespace(
            patch_size=8,
            num_image_tokens=49,
            num_additional_image_tokens=0,  # the class token, which would be subtracted later
            vision_feature_select_strategy="full" if is_onevision else "default",
            image_processor=SimpleNamespace(image_grid_pinpoints=_PINPOINTS),
            vision_aspect_ratio="anyres_max_9",
        )
        for name in ("_get_number_of_features", "_get_unpadded_features"):
            setattr(counting, name, MethodType(getattr(kind, name), counting))
        height, width = arguments["image_sizes"][0].tolist()
        num_tokens = counting._get_number_of_features(height, width, 56, 56)
        arrays = {"pixels": pixels[0], "sizes": np.array([image.height, image.width])}
        found.append(Reading(medium_of(arrays, ["before", in_line(num_tokens)]), arguments))
    return found


def read_qwen(settings: Mapping[str, Any], images: Sequence[Image.Image]) -> list[Reading]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(**settings)
    found = []
    for image in images:
        patches, arguments = bytes_and_numbers(processor, [image])
        (grid,) = arguments["image_grid_thw"].numpy()
        _, rows, columns = grid
        squares = patches.reshape(1, rows // 2, columns // 2, 2, 2, 3, 2, *[settings["patch_size"]] * 2)
        frames = squares.transpose(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(
            2, 3, -1, columns * settings["patch_size"]
        )
        assert (frames[0] == frames[1]).all()
        places = np.stack(np.meshgrid([0], np.arange(rows // 2), np.arange(columns // 2), indexing="ij"))
        piece = MediaPiece(places.reshape(3, -1))
        found.append(Reading(medium_of({"pixels": frames[:1], "grid": grid}, ["before", piece]), arguments))
    return found


def read_frames(num_tokens: int, num_frames: int, seed: int) -> Reading:
    """A video, with CLIP's scaling."""
    pixels = np.random.default_rng(seed).integers(0, 256, (num_frames, 3, 56, 56), dtype=np.uint8)
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (_CLIP["image_mean"], _CLIP["image_std"]))
    numbers = (torch.from_numpy(pixels) / 255 - mean) / std
    medium = medium_of({"pixels": pixels}, ["before", in_line(num_tokens)])
    return Reading(medium, {"pixel_values_videos": numbers.unsqueeze(0)})


def read_qwen_frames(patch: int, *, is_divided: bool, seed: int, num_times: int = 2) -> Reading:
    """A video of two frames for each time, with CLIP's scaling. ``is_divided``: there is text between its
    times."""
    height, width = 4, 6
    shape = 2 * num_times, 3, height * patch, width * patch
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (_CLIP["image_mean"], _CLIP["image_std"]))
    numbers = (torch.from_numpy(pixels) / 255 - mean) / std
    squares = numbers.view(num_times, 2, 3, height // 2, 2, patch, width // 2, 2, patch)
    patches = squares.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(num_times * height * width, -1)
    rows, columns = np.arange(height // 2), np.arange(width // 2)
    times = [[0]] * num_times if is_divided else [list(range(num_times))]
    places = [np.stack(np.meshgrid(t, rows, columns, indexing="ij")).reshape(3, -1) for t in times]
    pieces: list[str | MediaPiece] = []
    for number, place in enumerate(places):
        pieces += ["before", MediaPiece(place, number * place.shape[1])]
    grid = np.array([num_times, height, width])
    arguments = {"pixel_values_videos": patches, "video_grid_thw": torch.from_numpy(grid).unsqueeze(0)}
    if not is_divided:
        arguments["second_per_grid_ts"] = torch.tensor([0.25])
    return Reading(medium_of({"pixels": pixels, "grid": grid}, pieces), arguments)


def config_of(name: str, text: Mapping[str, Any] | None = None) -> Any:
    """The config of a model. ``text``: other values of its text model."""
    model = VISION_MODELS[name]
    if model.kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model.kind}")
    values = {**model.config, "text_config": {**model.config["text_config"], **(text or {})}}
    return transformers.AutoConfig.for_model(model.kind, **values)


def saved_vision_model(name: str, folder: Path, text: Mapping[str, Any] | None = None) -> Any:
    """A model with random weights, biases and norms, saved to ``folder`` with its processor's settings."""
    torch.manual_seed(0)
    made = transformers.AutoModelForImageTextToText.from_config(config_of(name, text))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    made.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(VISION_MODELS[name].settings))
    return made.eval()


@dataclass(frozen=True)
class Prompt:
    """``tokens``: with pseudo-tokens. ``ids``: with transformers' token for images."""

    tokens: list[int]
    ids: list[int]
    media: list[MediaRun]
    readings: list[Reading]


def prompt_of(readings: Sequence[Reading], seed: int = 0) -> Prompt:
    """Random text around the media."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    ids: list[int] = []
    media: list[MediaRun] = []

    def add_text(num: int) -> None:
        made = rng.integers(10, 290, num).tolist()
        tokens.extend(made)
        ids.extend(made)

    add_text(3)
    for reading in readings:
        for piece in reading.medium.pieces:
            if isinstance(piece, str):
                add_text(2)
                continue
            run = MediaRun(reading.medium.identity, len(tokens), piece.positions, piece.first, piece.sees_all)
            media.append(run)
            tokens += pseudo_tokens(run).tolist()
            is_video = "pixel_values_videos" in reading.arguments
            ids += [VIDEO_TOKEN if is_video else IMAGE_TOKEN] * run.num_tokens
        add_text(int(rng.integers(1, 6)))
    return Prompt(tokens, ids, media, list(readings))


def expected_logits(model: Any, prompt: Prompt, **more: torch.Tensor) -> torch.Tensor:
    """The logits of all tokens, [T, vocabulary], by transformers with more arguments. Tiles of images are
    independent, so the tiles of all images are one batch."""
    arguments: dict[str, torch.Tensor] = dict(more)
    for name in {name: None for reading in prompt.readings for name in reading.arguments}:
        parts = [reading.arguments[name] for reading in prompt.readings if name in reading.arguments]
        axis = 1 if model.config.model_type in ("idefics3", "smolvlm") else 0
        if name == "pixel_values" and parts[0].ndim == 5 and not axis:  # with other numbers of tiles
            most = max(part.shape[1] for part in parts)
            parts = [torch.nn.functional.pad(part, (*(0,) * 7, most - part.shape[1])) for part in parts]
        arguments[name] = torch.cat(parts, axis)
    if model.config.model_type in ("qwen2_5_vl", "qwen3_vl"):
        ids = torch.tensor([prompt.ids])
        arguments["mm_token_type_ids"] = (ids == IMAGE_TOKEN) + 2 * (ids == VIDEO_TOKEN)
    if model.config.model_type == "gemma3":
        arguments["token_type_ids"] = (torch.tensor([prompt.ids]) == IMAGE_TOKEN).long()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt.ids]), **arguments).logits[0]


_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
_CLIP_TOWER = TOWER | {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 8}
_SIGLIP_TOWER = TOWER | {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 8}
_LLAVA = {"image_token_index": IMAGE_TOKEN, "video_token_index": VIDEO_TOKEN}
_NEXT = _LLAVA | {"image_grid_pinpoints": _PINPOINTS}
_LLAMA_TEXT = {"text_config": TEXT | {"model_type": "llama"}}
_SQUARE = _CLIP | {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
_GRID = _SQUARE | {"image_grid_pinpoints": _PINPOINTS}
_TILES = {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 64}}
_IDEFICS3 = {
    "text_config": TEXT | {"model_type": "llama"},
    "vision_config": TOWER | {"image_size": 64, "patch_size": 8},
    "scale_factor": 2,
    "image_token_id": IMAGE_TOKEN,
}
_GEMMA = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 56, "width": 56}}
_GEMMA_TEXT = TEXT | {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 24}
_PATCHES = {"min_pixels": 3136, "max_pixels": 50_000, "merge_size": 2, "temporal_patch_size": 2}
_QWEN = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
_QWEN_TOWER = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "out_hidden_size": 48}
VISION_MODELS = {
    "qwen2_5_vl": VisionModel(
        "qwen2_5_vl",
        _QWEN
        | {
            "text_config": TEXT
            | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 500.0}},
            "vision_config": _QWEN_TOWER | {"window_size": 56, "fullatt_block_indexes": [1]},
        },
        _CLIP | _PATCHES | {"patch_size": 14},
        read_qwen,
    ),
    "qwen3_vl": VisionModel(
        "qwen3_vl",
        _QWEN
        | {
            "text_config": TEXT
            | {"head_dim": 16}
            | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 500.0}},
            "vision_config": _QWEN_TOWER
            | {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        },
        _CLIP | _PATCHES | {"patch_size": 16},
        read_qwen,
    ),
    "gemma3": VisionModel(
        "gemma3",
        {
            "text_config": _GEMMA_TEXT
            | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            "vision_config": _SIGLIP_TOWER | {"patch_size": 7},
            "mm_tokens_per_image": 16,
            "image_token_index": IMAGE_TOKEN,
        },
        _GEMMA,
        read_gemma3,
    ),
    "idefics3": VisionModel("idefics3", _IDEFICS3, _TILES, read_idefics3),
    "smolvlm": VisionModel("smolvlm", _IDEFICS3, _TILES, read_idefics3),
    "llava": VisionModel("llava", _LLAVA | _LLAMA_TEXT | {"vision_config": _CLIP_TOWER}, _SQUARE, read_llava),
    "llava_layers": VisionModel(
        "llava",
        _LLAVA
        | {"text_config": TEXT | {"model_type": "qwen2"}}
        | {"vision_config": _SIGLIP_TOWER | {"image_size": 60}}  # patches leave a rest, as in 384 / 14
        | {"vision_feature_layer": [-3, -1], "vision_feature_select_strategy": "full"},
        _CLIP | {"size": {"shortest_edge": 60}, "crop_size": {"height": 60, "width": 60}},
        read_llava,
    ),
    "llava_next": VisionModel(
        "llava_next",
        _NEXT | {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": _CLIP_TOWER},
        _GRID,
        read_any_resolution,
    ),
    "llava_next_video": VisionModel(
        "llava_next_video",
        _NEXT | _LLAMA_TEXT | {"vision_config": _CLIP_TOWER},
        _GRID,
        read_any_resolution,
    ),
    "llava_onevision": VisionModel(
        "llava_onevision",
        _NEXT | {"text_config": TEXT | {"model_type": "qwen2"}, "vision_config": _SIGLIP_TOWER},
        _CLIP
        | {"size": {"height": 56, "width": 56}, "image_grid_pinpoints": _PINPOINTS, "is_onevision": True},
        read_any_resolution,
    ),
}
