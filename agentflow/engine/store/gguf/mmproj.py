"""The projector file next to a GGUF model: its vision tower and projector, in the layout of llama.cpp's
``clip``.

An entry of ``PROJECTORS`` describes a kind of projector (``clip.projector_type``): its text models, and the
config, the image settings and the tensor names of the same model in transformers. Facts that the file leaves
out are assumed as in the released models, like in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from agentflow.engine.store.gguf.architectures import Config, StoredTensors
from agentflow.engine.store.gguf.container import Container, StoredTensor, read_container
from agentflow.engine.store.gguf.metadata import GgufMetadata
from agentflow.engine.store.gguf.tensors import (
    FramesTensor,
    GgufTensor,
    JoinedTensor,
    ModelTensor,
    whole_tensor,
)
from agentflow.errors import BadModelFolder

_MAX_LAYERS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorKind:
    """A kind of projector. ``names`` and ``layer`` map names in the file to names in the model, without
    ``.weight`` and ``.bias``."""

    texts: tuple[str, ...]  # ``general.architecture`` of its text models
    read: Callable[[GgufMetadata, StoredTensors], Config]  # returns the config, except ``text_config``
    images: Callable[[GgufMetadata, Config], Config]  # returns the equivalent of preprocessor_config.json
    text: str  # replaces "model." in the names of the text model
    tower: str  # the prefix of the names of the tower
    names: Mapping[str, str]
    layer: Mapping[str, str]  # below ``v.blk.N.`` in the file, below ``layers`` in the model
    layers: str
    qkv: str | None = None  # the name of the model's matrix for queries, keys and values, if it has one
    has_frames: bool = False  # the model's patches span frames; the file has a tensor for each frame
    template: str | None = None  # the chat template for models whose file has none


class VisionFile:
    """A projector file.

    Raises:
        BadModelFolder: the file is damaged, or of a kind that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        container = read_container(path)
        self._stored = container.tensors
        self._data = _metadata(container)
        data = self._data
        name = data.text(".projector_type", data.text(".vision.projector_type", "mlp"))
        if name not in PROJECTORS or not data.flag(".has_vision_encoder", True):
            raise BadModelFolder(
                f"{path.name} has a projector of the type {name!r}, and only {', '.join(PROJECTORS)} are "
                "supported: give the model's folder with safetensors",
                param="clip.projector_type",
            )
        self.kind = PROJECTORS[name]
        self._config = self.kind.read(data, self._stored)

    def check_text(self, architecture: str, width: int) -> None:
        """Raises ``BadModelFolder`` if the file belongs to another text model."""
        mine = self._data.integer(".vision.projection_dim", width)
        if architecture not in self.kind.texts or mine != width:
            raise BadModelFolder(
                f"{self.path.name} belongs to another model: it is for {mine} dimensions and "
                f"{' or '.join(self.kind.texts)}, and the model next to it has {width} dimensions and is "
                f"{architecture}: take the files of one model",
                param=self.path.name,
            )

    def config(self, text: Config, *, reads_videos: bool) -> Config:
        """Returns the config of the whole model. ``text``: the config of its text model. ``reads_videos``:
        the chat template has videos."""
        config = dict(self._config)
        if config["model_type"] == "idefics3" and reads_videos:  # both models have this kind of projector
            config |= {"model_type": "smolvlm", "architectures": ["SmolVLMForConditionalGeneration"]}
        shared = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
        return config | {"text_config": text} | {name: text[name] for name in shared if name in text}

    @property
    def images(self) -> Config:
        """The equivalent of ``preprocessor_config.json``."""
        data = self._data
        mean, std = data.numbers(".vision.image_mean"), data.numbers(".vision.image_std")
        given = {"image_mean": mean, "image_std": std} if mean and std else {}
        return self.kind.images(data, self._config) | given

    def text_name(self, name: str) -> str:
        """Returns the name in the whole model of a tensor of the text model."""
        return f"{self.kind.text}{name.removeprefix('model.')}" if name.startswith("model.") else name

    def tensors(self) -> Iterator[tuple[str, ModelTensor]]:
        """Yields the tensors under their names in the model. Unknown tensors keep their names."""
        kind, in_layers = self.kind, dict[tuple[str, str, str], StoredTensor]()
        for stored in self._stored.values():
            match stored.name.split("."):
                case ["v", "blk", layer, part, leaf]:
                    in_layers[layer, part, leaf] = stored
                case ["v", "patch_embd", "weight", *_] if kind.has_frames:
                    if stored.name == "v.patch_embd.weight":
                        yield f"{kind.tower}{kind.names['v.patch_embd']}.weight", self._frames(stored)
                case ["v", "deepstack", layer, part, leaf]:
                    number = _deep_layers(self._data).index(int(layer))
                    part = {"fc1": "linear_fc1", "fc2": "linear_fc2"}.get(part, part)
                    yield f"{kind.tower}deepstack_merger_list.{number}.{part}.{leaf}", whole_tensor(stored)
                case _:
                    yield self._named(stored)
        swaps = any(self._is_swapped(key, one) for key, one in in_layers.items())
        for (layer, part, leaf), stored in in_layers.items():
            yield from self._in_layer(
                in_layers, kind.layers.format(layer), (layer, part, leaf), stored, swaps
            )

    def _named(self, stored: StoredTensor) -> tuple[str, ModelTensor]:
        stem, dot, leaf = stored.name.rpartition(".")
        if leaf not in ("weight", "bias"):
            stem, dot, leaf = stored.name, "", ""
        name = self.kind.names.get(stem)
        if name is None:
            return stored.name, whole_tensor(stored)
        if stem == "mm.soft_emb_norm":  # stored plus 1, like the norms of the text model
            return name, replace(whole_tensor(stored), shift=-1.0)
        if name.endswith("_weight"):  # a parameter, not a module
            return name, whole_tensor(stored)
        before = "" if name.startswith("model.") else self.kind.tower
        return f"{before}{name}{dot}{leaf}", whole_tensor(stored)

    def _is_swapped(self, key: tuple[str, str, str], stored: StoredTensor) -> bool:
        """Whether the names of up and down are swapped, as in files of older converters."""
        is_down = key[1:] == ("ffn_down", "weight")
        return is_down and stored.shape[-1] == self._data.integer(".vision.embedding_length")

    def _in_layer(
        self,
        layers: Mapping[tuple[str, str, str], StoredTensor],
        prefix: str,
        key: tuple[str, str, str],
        stored: StoredTensor,
        swaps: bool,
    ) -> Iterator[tuple[str, ModelTensor]]:
        kind, (layer, part, leaf) = self.kind, key
        if swaps:
            part = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(part, part)
        if part in ("attn_q", "attn_k", "attn_v") and kind.qkv:
            rows = [layers.get((layer, one, leaf)) for one in ("attn_q", "attn_k", "attn_v")]
            parts = tuple([whole_tensor(one) for one in rows if one is not None])
            if part == "attn_q" and len(parts) == 3:
                shape = (sum(one.shape[0] for one in parts), *stored.shape[1:])
                yield f"{kind.tower}{prefix}{kind.qkv}.{leaf}", JoinedTensor(parts=parts, shape=shape)
        elif part == "attn_qkv" and not kind.qkv:
            count = stored.shape[0] // 3
            for number, one in enumerate(("attn_q", "attn_k", "attn_v")):
                shape = (count, *stored.shape[1:])
                tensor = GgufTensor(stored=stored, shape=shape, first=number * count, count=count)
                yield f"{kind.tower}{prefix}{kind.layer[one]}.{leaf}", tensor
        elif name := kind.qkv if part == "attn_qkv" else kind.layer.get(part):
            yield f"{kind.tower}{prefix}{name}.{leaf}", whole_tensor(stored)
        else:
            yield stored.name, whole_tensor(stored)

    def _frames(self, first: StoredTensor) -> ModelTensor:
        second = self._stored.get(f"{first.name}.1", first)
        shape = (*first.shape[:2], 2, *first.shape[2:])
        return FramesTensor(parts=(whole_tensor(first), whole_tensor(second)), shape=shape)


def _metadata(container: Container) -> GgufMetadata:
    data = GgufMetadata(container)
    if data.architecture != "clip":
        raise data.reject("general.architecture", f"is {data.architecture!r}, but must be 'clip'")
    return data


def _deep_layers(data: GgufMetadata) -> list[int]:
    """Returns the layers of the tower whose results are deep features, in order."""
    return [layer for layer, is_deep in enumerate(data.numbers(".vision.is_deepstack_layers")) if is_deep]


def _sizes(data: GgufMetadata) -> Config:
    """Returns the sizes of any tower."""
    num_layers = data.integer(".vision.block_count")
    if not 0 < num_layers <= _MAX_LAYERS:
        raise data.reject(".vision.block_count", f"is {num_layers}: a tower has 1 to {_MAX_LAYERS:,} layers")
    if data.flag(".use_gelu", False):
        activation = "gelu_pytorch_tanh"
    else:
        activation = "silu" if data.flag(".use_silu", False) else "quick_gelu"
    return {
        "hidden_size": data.integer(".vision.embedding_length"),
        "intermediate_size": data.integer(".vision.feed_forward_length"),
        "image_size": data.integer(".vision.image_size"),
        "patch_size": data.integer(".vision.patch_size"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": data.integer(".vision.attention.head_count"),
        "layer_norm_eps": data.number(".vision.attention.layer_norm_epsilon"),
        "hidden_act": activation,
    }


def _idefics3(data: GgufMetadata, stored: StoredTensors) -> Config:
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "scale_factor": data.integer(".vision.projector.scale_factor", 2),
        "vision_config": _sizes(data) | {"model_type": "idefics3_vision"},
    }


def _idefics3_images(data: GgufMetadata, config: Config) -> Config:
    side = config["vision_config"]["image_size"]
    longest = data.integer(".vision.preproc_image_size", 4 * side)
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}


def _llava(data: GgufMetadata, stored: StoredTensors) -> Config:
    """Reads LLaVA 1.5, or 1.6 if the file has a newline embedding. By default, the features are the results
    of the file's last layer: converters leave out unused layers."""
    vision, layers = _sizes(data), data.numbers(".vision.feature_layer")
    is_clip = "v.class_embd" in stored
    vision["model_type"] = "clip_vision_model" if is_clip else "siglip_vision_model"
    config: Config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": vision,
        "vision_feature_layer": [int(layer) for layer in layers] or vision["num_hidden_layers"],
        "vision_feature_select_strategy": "default" if is_clip else "full",
        "projector_hidden_act": "gelu",
    }
    if "model.image_newline" not in stored:
        return config
    numbers = [int(one) for one in data.numbers(".vision.image_grid_pinpoints")]
    if not numbers or len(numbers) % 2:
        raise data.reject(".vision.image_grid_pinpoints", "must be pairs of numbers")
    points = [list(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
    return config | {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "model_type": "llava_next",
        "image_grid_pinpoints": points,
    }


def _llava_images(data: GgufMetadata, config: Config) -> Config:
    side, is_clip = config["vision_config"]["image_size"], "clip" in config["vision_config"]["model_type"]
    square = {"height": side, "width": side}
    if config["model_type"] == "llava_next":
        size = {"shortest_edge": side} if is_clip else square
        return {"size": size, "crop_size": square, "image_grid_pinpoints": config["image_grid_pinpoints"]}
    if not is_clip:
        return {"size": square, "image_processor_type": "SiglipImageProcessor"}
    pads = data.text(".vision.image_aspect_ratio", "") == "pad"
    kind = "LlavaImageProcessor" if pads else "CLIPImageProcessor"
    shared = {"size": {"shortest_edge": side}, "crop_size": square}
    return shared | {"image_processor_type": kind, "do_pad": pads}


def _gemma3(data: GgufMetadata, stored: StoredTensors) -> Config:
    vision, scale = _sizes(data), data.integer(".vision.projector.scale_factor", 4)
    side = vision["image_size"] // vision["patch_size"] // scale
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": side * side,
        "vision_config": vision | {"model_type": "siglip_vision_model"},
    }


def _gemma3_images(data: GgufMetadata, config: Config) -> Config:
    side = config["vision_config"]["image_size"]
    return {"size": {"height": side, "width": side}}


def _qwen(data: GgufMetadata) -> Config:
    vision = _sizes(data)
    names = {"num_heads": "num_attention_heads", "depth": "num_hidden_layers"}
    return {
        **{new: vision.pop(old) for new, old in names.items()},
        **vision,
        "spatial_merge_size": data.integer(".vision.spatial_merge_size", 2),
        "temporal_patch_size": 2,
    }


def _qwen2_5(data: GgufMetadata, stored: StoredTensors) -> Config:
    vision, pattern = _qwen(data), data.integer(".vision.n_wa_pattern", 8)
    if pattern < 1:
        raise data.reject(".vision.n_wa_pattern", "must be at least 1")
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vision_config": vision
        | {
            "window_size": data.integer(".vision.window_size", 112),
            "fullatt_block_indexes": [*range(pattern - 1, vision["depth"], pattern)],
            "tokens_per_second": 2,
        },
    }


def _qwen3(data: GgufMetadata, stored: StoredTensors) -> Config:
    vision = _qwen(data)
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "vision_config": vision
        | {
            "num_position_embeddings": (vision["image_size"] // vision["patch_size"]) ** 2,
            "deepstack_visual_indexes": _deep_layers(data),
        },
    }


def _qwen_images(data: GgufMetadata, config: Config) -> Config:
    vision = config["vision_config"]
    limits = {"min_pixels": ".vision.image_min_pixels", "max_pixels": ".vision.image_max_pixels"}
    return {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": 2,
        **{name: data.integer(key) for name, key in limits.items() if key in data},
    }


_TILES: Final = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.class_embd": "embeddings.class_embedding",
    "v.pre_ln": "pre_layrnorm",
}
_TILE_LAYER: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN_NAMES: Final = {"v.patch_embd": "patch_embed.proj", "v.position_embd": "pos_embed"}
_QWEN_LAYER: Final = {"attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}
_VICUNA: Final = (
    "{% for m in messages %}{% if m['role'] == 'user' %}USER: "
    "{% elif m['role'] == 'assistant' %}ASSISTANT: {% endif %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>\n{% endif %}{% endfor %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% if m['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

PROJECTORS: Final[Mapping[str, ProjectorKind]] = {
    "idefics3": ProjectorKind(
        texts=("llama",),
        read=_idefics3,
        images=_idefics3_images,
        text="model.text_model.",
        tower="model.vision_model.",
        names=_TILES
        | {"v.post_ln": "post_layernorm", "mm.model.fc": "model.connector.modality_projection.proj"},
        layer=_TILE_LAYER,
        layers="encoder.layers.{}.",
    ),
    "mlp": ProjectorKind(
        texts=("llama", "qwen2", "qwen3"),
        read=_llava,
        images=_llava_images,
        text="model.language_model.",
        tower="model.vision_tower.vision_model.",
        names=_TILES
        | {
            "mm.0": "model.multi_modal_projector.linear_1",
            "mm.2": "model.multi_modal_projector.linear_2",
            "model.image_newline": "model.image_newline",
        },
        layer=_TILE_LAYER,
        layers="encoder.layers.{}.",
        template=_VICUNA,
    ),
    "gemma3": ProjectorKind(
        texts=("gemma3",),
        read=_gemma3,
        images=_gemma3_images,
        text="model.language_model.",
        tower="model.vision_tower.vision_model.",
        names=_TILES
        | {
            "v.post_ln": "post_layernorm",
            "mm.input_projection": "model.multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "model.multi_modal_projector.mm_soft_emb_norm.weight",
        },
        layer=_TILE_LAYER,
        layers="encoder.layers.{}.",
    ),
    "qwen2.5vl_merger": ProjectorKind(
        texts=("qwen2vl",),
        read=_qwen2_5,
        images=_qwen_images,
        text="model.language_model.",
        tower="model.visual.",
        names=_QWEN_NAMES | {"v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0", "mm.2": "merger.mlp.2"},
        layer=_QWEN_LAYER
        | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        layers="blocks.{}.",
        qkv="attn.qkv",
        has_frames=True,
    ),
    "qwen3vl_merger": ProjectorKind(
        texts=("qwen3vl",),
        read=_qwen3,
        images=_qwen_images,
        text="model.language_model.",
        tower="model.visual.",
        names=_QWEN_NAMES
        | {"v.post_ln": "merger.norm", "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2"},
        layer=_QWEN_LAYER | {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        layers="blocks.{}.",
        qkv="attn.qkv",
        has_frames=True,
    ),
}
"""The supported kinds of projectors, by ``clip.projector_type``."""
