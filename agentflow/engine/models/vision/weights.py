"""Reads the tensors of a tower from a checkpoint and packs them for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentflow.engine.models.vision.encoder import EncoderLayer, EncoderShape
from agentflow.engine.models.weights.checkpoint import TensorSource
from agentflow.errors import BadModelFolder
from agentflow.kernels.decoder_weights import Norm
from agentflow.kernels.inputs import LinearWeight
from agentflow.kernels.platforms import Kernels


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The names of a layer's tensors, below its prefix. ``qkv`` and ``up`` have one name for each part, or
    one name for a tensor with all parts."""

    input_norm: str = "layer_norm1"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.out_proj"
    mlp_norm: str = "layer_norm2"
    up: tuple[str, ...] = ("mlp.fc1",)
    down: str = "mlp.fc2"


class TowerWeights:
    """The tensors of a checkpoint below a prefix.

    Args:
        checkpoint: all tensors.
        kernels: the implementation that packs them.
        prefix: the prefix of their names.
    """

    def __init__(self, checkpoint: TensorSource, kernels: Kernels, prefix: str = "") -> None:
        self._checkpoint = checkpoint
        self.kernels = kernels
        self.prefix = prefix

    @property
    def dtype(self) -> torch.dtype:
        return self._checkpoint.dtype

    @property
    def device(self) -> torch.device:
        return self._checkpoint.device

    def below(self, *prefixes: str) -> TowerWeights:
        """Returns the tensors below the first of these prefixes that occurs in the checkpoint: releases
        differ."""
        for prefix in prefixes:
            whole = self.prefix + prefix
            if any(name.startswith(whole) for name in self._checkpoint.names):
                return TowerWeights(self._checkpoint, self.kernels, whole)
        raise BadModelFolder(
            f"its files have no tensors named {self.prefix}{prefixes[0]}…: its weights are incomplete, fetch "
            "the model again",
            param=self.prefix + prefixes[0],
        )

    def skip(self, *beginnings: str) -> None:
        """Marks the tensors whose names start with one of ``beginnings`` as unused."""
        for beginning in beginnings:
            self._checkpoint.skip(self.prefix + beginning)

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.take(self.prefix + name, *shape)

    def linear(
        self, names: Sequence[str] | str, num_outputs: int, num_inputs: int, *, gated: bool = False
    ) -> LinearWeight:
        """Returns one weight for matrices with the same input and the same number of outputs. ``gated``: as
        in ``LinearMethod.pack``."""
        names = [names] if isinstance(names, str) else names
        whole, size = [self.prefix + name for name in names], num_outputs // len(names)
        weight = self._checkpoint.take_rows(
            [f"{name}.weight" for name in whole], [size] * len(names), num_inputs
        )
        bias = self._checkpoint.take_biases([f"{name}.bias" for name in whole], [size] * len(names))
        return self.kernels.linear.pack(weight, bias, gated=gated)

    def patches(self, name: str, num_outputs: int, *shape: int) -> LinearWeight:
        """Returns a convolution whose stride is the size of its kernel, as a product with patches."""
        weight = self.tensor(f"{name}.weight", num_outputs, *shape).view(num_outputs, -1)
        bias = self._checkpoint.take_if_there(f"{self.prefix}{name}.bias", num_outputs)
        return self.kernels.linear.pack(weight, bias)

    def norm(self, name: str, size: int, eps: float, *, is_rms: bool = False) -> Norm:
        bias = None if is_rms else self.tensor(f"{name}.bias", size)
        return Norm(self.tensor(f"{name}.weight", size), bias, eps)

    def layer(
        self, shape: EncoderShape, eps: float, names: LayerNames, *, is_rms: bool = False
    ) -> EncoderLayer:
        """Returns the encoder layer below this prefix."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        return EncoderLayer(
            input_norm=self.norm(names.input_norm, hidden, eps, is_rms=is_rms),
            qkv=self.linear(names.qkv, 3 * hidden, hidden),
            output=self.linear(names.output, hidden, hidden),
            mlp_norm=self.norm(names.mlp_norm, hidden, eps, is_rms=is_rms),
            up=self.linear(names.up, (2 if shape.is_gated else 1) * inner, hidden, gated=shape.is_gated),
            down=self.linear(names.down, hidden, inner),
        )
