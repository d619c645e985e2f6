"""What a family declares: how its config is read, and what its weights are called.

``standard_shape`` reads the names that most configs have in common; a family changes what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentflow.engine.models.config import (
    Activation,
    DecoderConfig,
    LayerShape,
    RawConfig,
    architectures_of,
)
from agentflow.engine.models.rope import read_rope
from agentflow.errors import BadModelFolder

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The weights of a mixture of experts, below the layer's prefix. Each expert has its own tensors, with
    its number for ``{}``; or, if ``is_stacked``, one tensor has all experts, as inputs by outputs, with gate
    and up in turn. ``shared``: gate, up and down of the experts that compute every token."""

    router: str
    gate: str = ""
    up: str = ""
    down: str = ""
    gate_up: str = ""
    is_stacked: bool = False
    shared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LatentNames:
    """The weights of latent attention, below the layer's prefix."""

    queries: str = "self_attn.q_proj"
    q_down: str = "self_attn.q_a_proj"
    q_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """The names of tensors, without ``.weight`` and ``.bias``: those of a layer below ``layers``, a prefix
    with the layer's number for ``{}``. Empty where a family has none.

    ``qkv`` and ``gate_up`` have one name for each part, or a single one for all of them together.
    ``is_transposed``: matrices are stored as inputs by outputs. ``ignored``: endings of tensors that the
    forward pass does not use. ``ignored_parts``: beginnings of them."""

    embedding: str = "model.embed_tokens"
    positions: str = ""
    layers: str = "model.layers.{}."
    final_norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    output: str = "self_attn.o_proj"
    attention_norm: str = ""  # of the attention's output
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    output_norm: str = ""  # of the MLP's output
    experts: ExpertNames | None = None
    latent: LatentNames | None = None
    is_transposed: bool = False
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)  # old folders store them; they follow from the config
    ignored_parts: tuple[str, ...] = ()

    def without_head(self) -> WeightNames:
        """The names in a checkpoint of the model below the head, which do not begin with ``model.``."""
        shared = ("embedding", "positions", "layers", "final_norm")
        return replace(self, **{name: getattr(self, name).partition(".")[2] for name in shared})


@dataclass(frozen=True, slots=True)
class Family:
    """``models``: well-known ones. ``gguf``: the values of ``general.architecture`` in GGUF files. ``read``:
    returns the shape; ``BadModelFolder`` for what cannot be run. ``other_names``: those of other releases of
    the same architecture; the names with an embedding in the files count."""

    architecture: str
    models: str
    read: Callable[[RawConfig], DecoderConfig]
    names: WeightNames = WeightNames()
    other_names: tuple[WeightNames, ...] = ()
    gguf: tuple[str, ...] = ()

    def names_among(self, tensors: Collection[str]) -> WeightNames:
        """The names that fit the tensors of a model, or the usual ones."""
        fitting = (names for names in self.other_names if f"{names.embedding}.weight" in tensors)
        return next(fitting, self.names)


def architecture_of(raw: RawConfig) -> str:
    """The first of the config's architectures."""
    return str(next(iter(architectures_of(raw)), ""))


def activation_of(raw: RawConfig, *names: str) -> Activation:
    """The activation under the first of these names that the config has."""
    name = next((name for name in names if raw.get(name)), names[0])
    value = raw.get(name) or "silu"
    if value not in _ACTIVATIONS:
        known = ", ".join(map(repr, _ACTIVATIONS))
        raise BadModelFolder(f"the activation {value!r} is not supported, only {known}", param=name)
    return _ACTIVATIONS[value]


def standard_shape(raw: RawConfig, *, head_dim: int = 0, **changes: Any) -> DecoderConfig:
    """The shape under the names of Llama's config. ``head_dim``: where the config does not give it; 0 derives
    it from the other sizes. ``changes``: fields of ``DecoderConfig`` that differ."""
    hidden_size, num_heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    head_dim = int(raw.get("head_dim") or head_dim or hidden_size // num_heads)
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(f"{num_heads} heads over {num_kv_heads} KV heads of size {head_dim}")
    fields: dict[str, Any] = {
        "architecture": architecture_of(raw),
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": hidden_size,
        "intermediate_size": int(raw["intermediate_size"]),
        "num_layers": int(raw["num_hidden_layers"]),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "max_context": int(raw["max_position_embeddings"]),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "activation": activation_of(raw, "hidden_act", "hidden_activation"),
    }
    if "rope" not in changes:
        fields["rope"] = read_rope(raw)
    return DecoderConfig(**(fields | changes))


def layer_types(raw: RawConfig, default: Callable[[int], str]) -> Sequence[str]:
    """The kind of attention of each layer: ``layer_types``, or what older releases derive from its number."""
    num_layers = int(raw["num_hidden_layers"])
    types = raw.get("layer_types") or [default(i) for i in range(num_layers)]
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown or len(types) != num_layers:
        raise BadModelFolder(
            f"layers of the kind {', '.join(unknown)} are not supported"
            if unknown
            else f"layer_types has {len(types)} entries for {num_layers} layers",
            param="layer_types",
        )
    return [str(kind) for kind in types]


def windowed(raw: RawConfig, kinds: Sequence[str]) -> tuple[LayerShape, ...]:
    """Layers with the config's window where they slide. Empty where no window is smaller than the context:
    the layers are plain then."""
    window = int(raw.get("sliding_window") or 0)
    if not 0 < window < int(raw["max_position_embeddings"]) or "sliding_attention" not in kinds:
        return ()
    return tuple(LayerShape(window if kind == "sliding_attention" else 0) for kind in kinds)
