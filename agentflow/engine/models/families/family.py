"""The declaration of a family: how to read its config, and the names of its weights.

``standard_shape`` reads the fields that most configs share; a family sets the other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Final

from agentflow.engine.models.config import (
    DecoderConfig,
    LayerRope,
    LayerShape,
    NormKind,
    RawConfig,
    read_architectures,
)
from agentflow.engine.models.rope import RopeConfig, make_rope, read_rope
from agentflow.errors import BadModelFolder
from agentflow.kernels.activations import Activation

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
# The names of the same field in different families.
_ACTIVATION: Final = ("hidden_activation", "hidden_act", "activation_function", "activation")
_LAYER_NORM_EPS: Final = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the weights of a mixture of experts, below the layer's prefix. ``{}`` stands for the
    number of an expert, unless all experts are in one tensor."""

    router: str
    gate: str = ""
    up: str = ""
    down: str = ""
    gate_up: str = ""  # for stacked experts
    is_stacked: bool = False  # one tensor has all experts, as inputs by outputs; gate and up are interleaved
    shared: tuple[str, ...] = ()  # gate, up and down of the experts that compute every token


@dataclass(frozen=True, slots=True)
class LatentNames:
    """The names of the weights of latent attention, below the layer's prefix."""

    queries: str = "self_attn.q_proj"
    q_down: str = "self_attn.q_a_proj"
    q_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """The names of tensors, without ``.weight`` and ``.bias``. A name is empty if the family has no such
    tensor. The names of a layer's tensors, from ``input_norm`` to ``latent``, are below its prefix.

    ``qkv`` and ``gate_up`` have one name for each part, or one name if a single tensor has all parts."""

    embedding: str = "model.embed_tokens"
    positions: str = ""
    layers: str = "model.layers.{}."  # the prefix of a layer; ``{}`` is its number
    final_norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"  # ``{}``, here and below: the number of a head, if each has a tensor
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    output: str = "self_attn.o_proj"
    attention_norm: str = ""  # the norm of the attention's output
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    output_norm: str = ""  # the norm of the MLP's output
    experts: ExpertNames | None = None
    latent: LatentNames | None = None
    is_transposed: bool = False  # matrices are stored as inputs by outputs
    # Two orders of the rows of ``qkv`` that differ from the forward pass (``weights/row_order``).
    has_pairs: bool = False  # adjacent rows of a query or key rotate together
    is_fused_by_head: bool = False  # one tensor has the queries of a KV head before its key and value
    # Suffixes of the names of tensors that the forward pass does not use. Old folders store frequencies,
    # which follow from the config.
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    # Prefixes of such names, or of names in a vision tower (``vision/loading``).
    ignored_parts: tuple[str, ...] = ()

    def without_head(self) -> WeightNames:
        """Returns the names in a checkpoint without a head, which have no first part such as ``model.``."""
        shared = ("embedding", "positions", "layers", "final_norm")
        return replace(self, **{name: getattr(self, name).partition(".")[2] for name in shared})


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture that runs natively."""

    architecture: str  # as in ``config.json``
    models: str  # well-known models, for the docs
    read: Callable[[RawConfig], DecoderConfig]  # raises ``BadModelFolder`` for models that cannot be run
    names: WeightNames = WeightNames()
    other_names: tuple[WeightNames, ...] = ()  # the names in other releases, sizes or formats
    gguf: tuple[str, ...] = ()  # the values of ``general.architecture`` in GGUF files

    def names_among(self, tensors: Collection[str]) -> WeightNames:
        """Returns the names that fit the tensors of a model best; ``names`` if none fit better."""

        def num_found(names: WeightNames) -> int:
            first = names.layers.format(0)
            norms = f"{first}{names.input_norm}", f"{first}{names.mlp_norm}"
            return sum(f"{name}.weight" in tensors for name in (names.embedding, names.head, *norms))

        return max((self.names, *self.other_names), key=num_found)


def read_activation(raw: RawConfig, *names: str) -> Activation:
    """Returns the activation in the first of these fields that the config has; SiLU if it has none."""
    name = next((name for name in names if raw.get(name)), names[0])
    value = raw.get(name) or "silu"
    if value not in _ACTIVATIONS:
        known = ", ".join(map(repr, _ACTIVATIONS))
        raise BadModelFolder(f"the activation {value!r} is not supported, only {known}", param=name)
    return _ACTIVATIONS[value]


def standard_shape(raw: RawConfig, *, norm: NormKind = "rms", **changes: Any) -> DecoderConfig:
    """Reads a shape from a config with the field names of Llama.

    Args:
        raw: the config.
        norm: as in ``DecoderConfig``; selects the field of the epsilon.
        changes: values for other fields of ``DecoderConfig``.
    """
    hidden_size, num_heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    head_dim = int(raw.get("head_dim") or hidden_size // num_heads)
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(f"{num_heads} heads over {num_kv_heads} KV heads of size {head_dim}")
    if norm in ("rms", "rms_less_one"):
        eps = raw.get("rms_norm_eps", 1e-6)
    else:
        eps = next((raw[name] for name in _LAYER_NORM_EPS if name in raw), 1e-5)
    fields: dict[str, Any] = {
        "architecture": str(next(iter(read_architectures(raw)), "")),
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": hidden_size,
        "intermediate_size": int(raw["intermediate_size"]),
        "num_layers": int(raw["num_hidden_layers"]),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "norm": norm,
        "norm_eps": float(eps),
        "max_context": int(raw["max_position_embeddings"]),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }
    if "activation" not in changes:
        fields["activation"] = read_activation(raw, *_ACTIVATION)
    if "rope" not in changes:
        fields["rope"] = read_rope(raw)
    return DecoderConfig(**(fields | changes))


def gpt_fields(raw: RawConfig) -> dict[str, Any]:
    """Returns a config in GPT-2's format with the field names of ``standard_shape``."""
    return {
        **raw,
        "hidden_size": raw["n_embd"],
        "intermediate_size": raw.get("n_inner") or 4 * int(raw["n_embd"]),
        "num_hidden_layers": raw["n_layer"],
        "num_attention_heads": raw["n_head"],
        "max_position_embeddings": raw["n_positions"],
    }


def read_ropes(raw: RawConfig, local_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """Returns the ropes of full and of sliding layers. ``rope_parameters`` has both; configs of older
    releases scale only the rope of full layers. ``local_theta``: the default for sliding layers."""
    parameters = raw.get("rope_parameters") or {}
    is_flat = not {"full_attention", "sliding_attention"} & parameters.keys()
    full = (parameters if is_flat else parameters.get("full_attention")) or {}
    local = parameters.get("sliding_attention") or {}
    scaled = dict(full) | dict(raw.get("rope_scaling") or {})
    return make_rope(raw, scaled), make_rope(raw, {"rope_theta": local_theta, **local})


def windowed(
    raw: RawConfig,
    slides: Callable[[int], bool] = lambda layer: True,
    *,
    sliding: LayerRope = "global",
    full: LayerRope = "global",
) -> tuple[LayerShape, ...]:
    """Returns the layers of a model with windows; empty if all are plain. A window as large as the context is
    dropped.

    Args:
        raw: the config. ``layer_types`` has the kind of attention of each layer.
        slides: whether a layer has a window, for configs of older releases, without ``layer_types``.
        sliding: the rope of layers with a window.
        full: the rope of the other layers.
    """
    num_layers = int(raw["num_hidden_layers"])
    kinds = raw.get("layer_types") or [
        "sliding_attention" if slides(i) else "full_attention" for i in range(num_layers)
    ]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != num_layers:
        raise BadModelFolder(
            f"layers of the kind {', '.join(unknown)} are not supported"
            if unknown
            else f"layer_types has {len(kinds)} entries for {num_layers} layers",
            param="layer_types",
        )
    window = int(raw.get("sliding_window") or 0)
    if not 0 < window < int(raw["max_position_embeddings"]):
        window = 0
    by_kind = {"sliding_attention": LayerShape(window, sliding), "full_attention": LayerShape(rope=full)}
    layers = tuple(by_kind[kind] for kind in kinds)
    return () if set(layers) == {LayerShape()} else layers
