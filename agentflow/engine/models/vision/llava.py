"""The towers of LLaVA and its successors: CLIP or SigLIP, and an MLP between it and the text model.

LLaVA 1.5 (arXiv 2310.03744) reads a square image. LLaVA-NeXT and LLaVA-OneVision (arXiv 2408.03326) read the
tiles of an image of any resolution. In videos, each frame is a tile with fewer features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentflow.engine.media.processors.anyres import NEXT_RESOLUTIONS, ONEVISION_RESOLUTIONS, choose_grid
from agentflow.engine.media.processors.pixels import Size
from agentflow.engine.media.settings import PixelScaling
from agentflow.engine.models.config import RawConfig, read_architectures
from agentflow.engine.models.vision.any_resolution import pack, reduced
from agentflow.engine.models.vision.encoder import Rows
from agentflow.engine.models.vision.pieces import Pieces, by_rows
from agentflow.engine.models.vision.siglip import (
    TileEncoder,
    TileTower,
    below_tower,
    load_tiles,
    plain_activation,
    read_tiles,
)
from agentflow.engine.models.vision.tower import Arrays, Features, TileRange, product_flops
from agentflow.engine.models.vision.weights import TowerWeights
from agentflow.engine.store.config_parts import text_config, vision_config
from agentflow.errors import BadArgument, BadModelFolder
from agentflow.kernels.activations import PlainActivation
from agentflow.kernels.inputs import LinearWeight


@dataclass(frozen=True, slots=True)
class Projector:
    """The MLP between a tower and its text model."""

    first: LinearWeight
    activation: PlainActivation
    second: LinearWeight


Pool = Callable[[Tensor], Tensor]
"""Reduces the features of frames, [frames, rows, columns, size]."""


@dataclass(frozen=True, slots=True)
class AnyResolution:
    """The parameters of ``any_resolution.pack``. In a video, ``pool_before`` reduces the features of frames
    before the projector, or ``pool_after`` after it. With ``pool_after``, a video ends with ``newline``."""

    resolutions: Sequence[Size]
    newline: Tensor
    max_tiles: int
    pool_before: Pool | None = None
    pool_after: Pool | None = None


class LlavaTower(TileTower):
    """The tower.

    Args:
        tiles: the encoder.
        layers: the features are the results after these numbers of layers, concatenated.
        projector: the MLP.
        scaling: the scaling of pixels.
        keeps_class: the class token is a feature.
        any_resolution: how tiles are joined; None: an image is one tile.
    """

    def __init__(
        self,
        tiles: TileEncoder,
        layers: Sequence[int],
        projector: Projector,
        scaling: PixelScaling,
        *,
        keeps_class: bool,
        any_resolution: AnyResolution | None,
    ) -> None:
        super().__init__(tiles, scaling)
        self.kept_layers = sorted({layer - 1 for layer in layers})
        self._layers = layers
        self._keeps_class = keeps_class
        self._projector = projector
        self._any_resolution = any_resolution

    @property
    def nbytes(self) -> int:
        return self._tiles.nbytes + self._projector.first.nbytes + self._projector.second.nbytes

    def parts(self, arrays: Arrays, most_rows: int) -> list[TileRange]:
        parts = super().parts(arrays, most_rows)
        if self._any_resolution is None and len(arrays["pixels"]) > 1:
            raise BadArgument(f"image: the model reads one tile, not {len(arrays['pixels'])}", param="image")
        return parts

    def finish_flops(self, part: TileRange) -> float:
        return product_flops(part.num_rows, self._projector.first, self._projector.second)

    def finish(self, arrays: Arrays, rows: Rows, kept: Sequence[Tensor], count: int) -> Pieces[list[Tensor]]:
        """Returns [tiles, features of a tile, hidden_size]."""
        taken = [kept[self.kept_layers.index(layer - 1)] for layer in self._layers]
        features = torch.cat(taken, dim=-1).view(
            -1, self._tiles.shape.num_rows, taken[0].shape[-1] * len(taken)
        )
        if self._tiles.shape.has_class and not self._keeps_class:
            features = features[:, 1:]
        packing = self._any_resolution if self._is_video(arrays) else None
        if packing is not None and packing.pool_before is not None:
            features = _pooled(features, packing.pool_before)
        projected = yield from by_rows(self._project, features.flatten(0, 1), count)
        projected = projected.view(*features.shape[:2], -1)
        if packing is not None and packing.pool_after is not None:
            projected = _pooled(projected, packing.pool_after)
        return [projected]

    def _project(self, features: Tensor) -> Tensor:
        kernels, projector = self._tiles.kernels, self._projector
        inner = kernels.linear.multiply(features, projector.first, activation=projector.activation)
        return kernels.linear.multiply(inner, projector.second)

    def join(self, arrays: Arrays, parts: Sequence[list[Tensor]]) -> Features:
        tiles = torch.cat([part[0] for part in parts])
        packing = self._any_resolution
        if packing is None:
            return Features(tiles.flatten(0, 1))
        if self._is_video(arrays):
            rows = tiles.flatten(0, 1)
            return Features(rows if packing.pool_after is None else torch.cat((rows, packing.newline[None])))
        height, width = arrays["sizes"].reshape(-1)[:2].tolist()
        grid = choose_grid((height, width), packing.resolutions, self._tiles.shape.side)
        return Features(pack(tiles, (height, width), grid, packing.newline, packing.max_tiles))

    def _is_video(self, arrays: Arrays) -> bool:
        return self._any_resolution is not None and "sizes" not in arrays


def _pooled(features: Tensor, pool: Pool) -> Tensor:
    side = math.isqrt(features.shape[1])
    return pool(features.view(len(features), side, side, -1)).flatten(1, 2)


def load_llava(weights: TowerWeights, raw: RawConfig, scaling: PixelScaling) -> LlavaTower:
    """Loads the tower and the projector of a model."""
    vision, hidden = vision_config(raw), int(text_config(raw)["hidden_size"])
    shape = read_tiles(vision)
    layers, keeps_class = _taken_layers(raw, shape.encoder.num_layers)
    below = below_tower(weights)
    for unused in range(max(layers), shape.encoder.num_layers):
        below.skip(f"encoder.layers.{unused}.")
    shape = shape.with_layers(max(layers))
    projector = weights.below("multi_modal_projector.", "model.multi_modal_projector.")
    return LlavaTower(
        load_tiles(below, shape, is_normed=False),
        layers,
        Projector(
            projector.linear("linear_1", hidden, shape.encoder.hidden_size * len(layers)),
            plain_activation({"hidden_act": raw.get("projector_hidden_act") or "gelu"}),
            projector.linear("linear_2", hidden, hidden),
        ),
        scaling,
        keeps_class=keeps_class,
        any_resolution=_any_resolution(weights, raw, hidden),
    )


def _taken_layers(raw: RawConfig, num_layers: int) -> tuple[list[int], bool]:
    """Returns the numbers of layers after which features are taken, and whether the class token is one."""
    is_onevision = "LlavaOnevisionForConditionalGeneration" in read_architectures(raw)
    given = raw.get("vision_feature_layer", -1 if is_onevision else -2)
    layers = [int(one) for one in (given if isinstance(given, list) else [given])]
    layers = [layer if layer >= 0 else num_layers + 1 + layer for layer in layers]
    if not layers or min(layers) < 1 or max(layers) > num_layers:
        raise BadModelFolder(
            f"vision_feature_layer is {given!r}, and there are {num_layers} layers",
            param="vision_feature_layer",
        )
    strategy = raw.get("vision_feature_select_strategy", "full" if is_onevision else "default")
    if strategy not in ("default", "full"):
        raise BadModelFolder(
            f"vision_feature_select_strategy must be default or full, not {strategy!r}",
            param="vision_feature_select_strategy",
        )
    return layers, strategy == "full"


def _any_resolution(weights: TowerWeights, raw: RawConfig, hidden: int) -> AnyResolution | None:
    [architecture] = read_architectures(raw)
    if architecture == "LlavaForConditionalGeneration":
        return None
    is_onevision = architecture == "LlavaOnevisionForConditionalGeneration"
    default = ONEVISION_RESOLUTIONS if is_onevision else NEXT_RESOLUTIONS
    given = raw.get("image_grid_pinpoints") or default
    ratio = str(raw.get("vision_aspect_ratio") or "anyres_max_9")
    any_resolution = AnyResolution(
        [(int(height), int(width)) for height, width in given],
        weights.below("image_newline", "model.image_newline").tensor("", hidden),
        int(ratio.removeprefix("anyres_max_")) if is_onevision else 0,
    )
    if is_onevision:
        return replace(any_resolution, pool_after=_halved)
    if architecture == "LlavaNextForConditionalGeneration":
        return any_resolution
    return replace(any_resolution, pool_before=_strided(raw))


def _halved(frames: Tensor) -> Tensor:
    return reduced(frames, (math.ceil(frames.shape[1] / 2), math.ceil(frames.shape[2] / 2)))


def _strided(raw: RawConfig) -> Pool:
    mode, stride = raw.get("spatial_pool_mode", "average"), int(raw.get("spatial_pool_stride", 2))
    if mode not in ("average", "max") or stride < 1:
        raise BadModelFolder(
            f"spatial_pool_mode must be average or max, not {mode!r} with stride {stride}",
            param="spatial_pool_mode",
        )
    pool = torch.nn.functional.avg_pool2d if mode == "average" else torch.nn.functional.max_pool2d
    return lambda frames: pool(frames.permute(0, 3, 1, 2), stride, stride).permute(0, 2, 3, 1)
