"""Loads the tower of a model folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from agentflow.engine.media.settings import PixelScaling, pixel_scaling
from agentflow.engine.models.config import RawConfig, read_folder
from agentflow.engine.models.families.registry import FAMILIES
from agentflow.engine.models.vision.gemma3 import load_gemma3
from agentflow.engine.models.vision.idefics3 import load_idefics3
from agentflow.engine.models.vision.llava import load_llava
from agentflow.engine.models.vision.qwen import load_qwen2_5, load_qwen3
from agentflow.engine.models.vision.tower import Tower
from agentflow.engine.models.vision.weights import TowerWeights
from agentflow.engine.models.weights.loader import open_checkpoint
from agentflow.engine.store.gguf.file import find_gguf, open_gguf
from agentflow.errors import BadModelFolder
from agentflow.kernels.platforms import Kernels

logger = logging.getLogger(__name__)

TOWERS: Final[Mapping[str, Callable[[TowerWeights, RawConfig, PixelScaling], Tower]]] = {
    "Gemma3ForConditionalGeneration": load_gemma3,
    "Idefics3ForConditionalGeneration": load_idefics3,
    "LlavaForConditionalGeneration": load_llava,
    "LlavaNextForConditionalGeneration": load_llava,
    "LlavaNextVideoForConditionalGeneration": load_llava,
    "LlavaOnevisionForConditionalGeneration": load_llava,
    "Qwen2_5_VLForConditionalGeneration": load_qwen2_5,
    "Qwen3VLForConditionalGeneration": load_qwen3,
    "SmolVLMForConditionalGeneration": load_idefics3,
}
"""The loader of each architecture that reads images, by the architecture's name in ``config.json``."""


def load_tower(
    folder: Path, architecture: str, *, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> Tower | None:
    """Loads the vision tower of a folder. None: the model reads no images, or its folder has only the text
    model.

    Args:
        folder: The model's folder.
        architecture: A key of ``TOWERS``, or the architecture of a model without images.
        dtype: The type of matrices.
        device: The device of the tower.
        kernels: The kernels that compute it.

    Raises:
        BadModelFolder: the configuration is wrong, or tensors are missing, misshapen or left over.
    """
    load = TOWERS.get(architecture)
    if (gguf := find_gguf(folder)) is not None and (unread := open_gguf(gguf).unread) is not None:
        logger.warning("%s reads no images: %s", gguf.name, unread)
    if load is None:
        return None
    with torch.inference_mode(), open_checkpoint(folder, dtype, device) as checkpoint:
        parts = FAMILIES[architecture].names_among(checkpoint.names).ignored_parts
        if not any(name.startswith(parts) for name in checkpoint.names):
            return None
        try:
            raw = read_folder(folder)[0]
            tower = load(TowerWeights(checkpoint, kernels), raw, pixel_scaling(folder))
        except BadModelFolder as error:
            raise BadModelFolder(f"{folder}: {error}", param=error.param) from None
        except KeyError as error:
            raise BadModelFolder(
                f"{folder}: vision_config has no {error}", param=str(error.args[0])
            ) from None
        except (TypeError, ValueError, ArithmeticError) as error:
            raise BadModelFolder(
                f"{folder}: vision_config has an invalid value: {error}", param="vision_config"
            ) from error
        checkpoint.refuse_leftovers(only=parts)
    return tower
