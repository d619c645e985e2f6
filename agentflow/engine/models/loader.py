"""Brings the weights of a Llama-family folder into the layout of the forward pass."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from agentflow.engine.models.checkpoint import Checkpoint
from agentflow.engine.models.config import LlamaConfig
from agentflow.engine.models.llama import LlamaModel
from agentflow.engine.models.rope import inverse_frequencies
from agentflow.kernels.decoder_weights import DecoderWeights, LayerWeights
from agentflow.kernels.linear_weight import LinearWeight
from agentflow.kernels.ops import Kernels


def load_llama(
    folder: Path, config: LlamaConfig, *, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> LlamaModel:
    """The model of ``folder``, with weights of any stored float type cast to ``dtype``.

    Each product's matrix is packed as soon as it is read, so that beyond the result only one of them is in
    memory. BadModelFolder if tensors are missing, misshapen or left over.
    """
    with torch.inference_mode(), Checkpoint(folder, dtype, device) as checkpoint:
        model = _Loader(checkpoint, config, kernels).model()
        # Old Llama folders store the rotary frequencies, which follow from the config.
        checkpoint.refuse_leftovers("rotary_emb.inv_freq", *(["lm_head.weight"] if model.is_tied else []))
    return model


class _Loader:
    def __init__(self, checkpoint: Checkpoint, config: LlamaConfig, kernels: Kernels) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._kernels = kernels

    def model(self) -> LlamaModel:
        config, take = self._config, self._checkpoint.take
        embedding = take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            head = embedding
        else:
            head = take("lm_head.weight", config.vocab_size, config.hidden_size)
        decoder = DecoderWeights(
            embedding=embedding,
            layers=[self._layer(f"model.layers.{i}.") for i in range(config.num_layers)],
            final_norm=take("model.norm.weight", config.hidden_size),
            frequencies=inverse_frequencies(config.rope, config.head_dim).to(embedding.device),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.rms_norm_eps,
        )
        packed_head = self._kernels.pack_linear(head, None, exact_output=True)
        return LlamaModel(config, self._kernels, decoder, packed_head)

    def _layer(self, prefix: str) -> LayerWeights:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = {f"{attention}q_proj": queries, f"{attention}k_proj": keys, f"{attention}v_proj": keys}
        return LayerWeights(
            input_norm=self._norm(f"{prefix}input_layernorm", hidden),
            qkv=self._linear(qkv, hidden),
            q_norm=self._norm(f"{attention}q_norm", config.head_dim) if config.has_qk_norm else None,
            k_norm=self._norm(f"{attention}k_norm", config.head_dim) if config.has_qk_norm else None,
            output=self._linear({f"{attention}o_proj": hidden}, queries),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm", hidden),
            gate_up=self._linear({f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}, hidden, gated=True),
            down=self._linear({f"{mlp}down_proj": hidden}, inner),
        )

    def _norm(self, name: str, size: int) -> Tensor:
        return self._checkpoint.take(f"{name}.weight", size)

    def _linear(self, parts: dict[str, int], num_inputs: int, *, gated: bool = False) -> LinearWeight:
        """One product for several matrices with the same input: name to number of outputs."""
        names, sizes = [f"{name}.weight" for name in parts], list(parts.values())
        weight = self._checkpoint.take_rows(names, sizes, num_inputs)
        biases = [self._checkpoint.take_if_there(f"{name}.bias", size) for name, size in parts.items()]
        bias = None
        if any(b is not None for b in biases):
            bias = weight.new_zeros(len(weight))
            for part, read in zip(torch.split(bias, sizes), biases, strict=True):
                if read is not None:
                    part.copy_(read)
        return self._kernels.pack_linear(weight, bias, gated=gated)
