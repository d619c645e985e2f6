"""Computes the embedding of a text from its hidden states: pooling, dense layers, norm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from agentflow.engine.batch import FloatArray
from agentflow.engine.store.embedding_folder import DenseLayer, EmbeddingFolder, Pooling
from agentflow.errors import BadModelFolder

_SMALLEST = 1e-12


def pooled(hidden: Tensor, lens: Tensor, poolings: Sequence[Pooling]) -> Tensor:
    """Returns the poolings of B texts, concatenated, in float32: [B, len(poolings) * hidden_size].

    Args:
        hidden: [B, T, hidden_size].
        lens: [B], at least 1: the rows of ``hidden`` that belong to each text; the others are padding.
        poolings: in the order of the result.
    """
    wide = hidden.float()
    places = torch.arange(hidden.shape[1], device=hidden.device)
    is_text = (places < lens.unsqueeze(1)).unsqueeze(2)  # [B, T, 1]
    counts = lens.unsqueeze(1).float()
    parts: list[Tensor] = []
    for pooling in poolings:
        match pooling:
            case "cls":
                part = wide[:, 0]
            case "lasttoken":
                part = wide[torch.arange(len(wide), device=wide.device), lens - 1]
            case "max":
                part = wide.masked_fill(~is_text, -torch.inf).amax(dim=1)
            case "mean":
                part = (wide * is_text).sum(dim=1) / counts
            case "mean_sqrt_len_tokens":
                part = (wide * is_text).sum(dim=1) / counts.sqrt()
            case "weightedmean":
                weights = is_text * (places + 1).view(1, -1, 1).float()
                part = (wide * weights).sum(dim=1) / weights.sum(dim=1)
        parts.append(part)
    return torch.cat(parts, dim=1)


class EmbeddingHead:
    """The steps after the pooling. ``size``: the number of dimensions of the embedding."""

    def __init__(self, embedding: EmbeddingFolder, hidden_size: int, device: torch.device) -> None:
        self.size = hidden_size * len(embedding.poolings)
        self._steps: list[_Dense | None] = []
        for step in embedding.steps:
            if step is None:
                self._steps.append(None)
                continue
            if step.in_features != self.size:
                raise BadModelFolder(
                    f"{step.folder}: in_features is {step.in_features}, and the step before it has "
                    f"{self.size} dimensions",
                    param="in_features",
                )
            self._steps.append(_Dense(step, device))
            self.size = step.out_features

    def __call__(self, states: Tensor) -> FloatArray:
        """Returns the embeddings of pooled states: [S, size]."""
        wide = states.float()
        for step in self._steps:
            wide = _normalised(wide) if step is None else step(wide)
        result: FloatArray = np.ascontiguousarray(wide.cpu().numpy(), dtype=np.float32)
        return result


class _Dense:
    def __init__(self, layer: DenseLayer, device: torch.device) -> None:
        activation = getattr(torch.nn, layer.activation, None)
        if not (isinstance(activation, type) and issubclass(activation, torch.nn.Module)):
            raise BadModelFolder(
                f"{layer.folder}: there is no activation {layer.activation}", param="activation_function"
            )
        self._activation: torch.nn.Module = activation()
        file = layer.folder / "model.safetensors"
        try:
            tensors = load_file(file, device=str(device))
        except (OSError, SafetensorError) as error:
            raise BadModelFolder(f"{file} cannot be read: {error}", param=file.name) from error
        weight = tensors.get("linear.weight")
        bias = tensors.get("linear.bias")
        if (
            weight is None
            or weight.shape != (layer.out_features, layer.in_features)
            or (layer.has_bias and (bias is None or bias.shape != (layer.out_features,)))
        ):
            raise BadModelFolder(
                f"{file} does not have the layer that its config describes", param="linear.weight"
            )
        self._weight = weight.float()
        self._bias = bias.float() if layer.has_bias and bias is not None else None

    def __call__(self, states: Tensor) -> Tensor:
        result: Tensor = self._activation(torch.nn.functional.linear(states, self._weight, self._bias))
        return result


def _normalised(states: Tensor) -> Tensor:
    return torch.nn.functional.normalize(states, dim=-1, eps=_SMALLEST)
