"""Reads how a model folder makes embeddings: the files of sentence-transformers, without torch.

``modules.json`` lists the modules: the model, the pooling of its hidden states, and the steps after it (dense
layers, a norm). A folder without it is a decoder whose last hidden state is the embedding, or an encoder
whose hidden states are averaged; both are normalised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from agentflow.engine.store.model_folder import json_object
from agentflow.errors import BadArgument, BadModelFolder

Pooling = Literal["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

MODULES: Final = "modules.json"
EMBEDDING_FILES: Final = (MODULES, "sentence_bert_config.json", "config_sentence_transformers.json")
"""The files that are read in addition to the files of every model."""

_FLAGS: Final[Mapping[str, Pooling]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A dense layer after the pooling."""

    folder: Path  # contains its ``config.json`` and ``model.safetensors``
    in_features: int
    out_features: int
    has_bias: bool
    activation: str  # a class of torch.nn


@dataclass(frozen=True, slots=True)
class EmbeddingFolder:
    """How a model makes embeddings."""

    poolings: tuple[Pooling, ...]  # their results are concatenated in this order
    steps: tuple[DenseLayer | None, ...]  # after the pooling; None: normalise
    max_tokens: int | None = None  # the longest text; None: the folder has no limit
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts to put before an input, by name
    default_prompt: str | None = None  # the name of the prompt for inputs without one
    lowercases: bool = False  # texts are lowercased before they are encoded
    is_causal: bool = False  # a token does not attend to later tokens

    @property
    def takes_last(self) -> bool:
        """Whether the embedding is a decoder's hidden state of the last token, so that a paged KV pool can be
        used."""
        return self.is_causal and self.poolings == ("lasttoken",)

    def prefix(self, name: str | None) -> str:
        """Returns the prompt with this name; the default prompt for None. Raises ``BadArgument`` for an
        unknown name."""
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise BadArgument(
                f"the model has no prompt {name[:100]!r} (its prompts: {known})", param="prompt_name"
            )
        return self.prompts[name]


def read_embedding_folder(folder: Path) -> EmbeddingFolder:
    """Reads how the model in a folder or GGUF file makes embeddings. Raises ``BadModelFolder`` for unknown
    modules."""
    from agentflow.engine.store.gguf.file import find_gguf, open_gguf  # needs numpy; `doctor` does not

    if (file := find_gguf(folder)) is not None:
        if not open_gguf(file).pools_last:
            raise BadModelFolder(
                f"{file.name}: GGUF files are supported only if the last token makes the embedding: give the "
                "model's folder with safetensors, or its OWNER/NAME on the hub",
                param="pooling_type",
            )
        return EmbeddingFolder(("lasttoken",), (None,), is_causal=True)
    config = json_object(folder / "config.json") or {}
    is_causal = _is_causal(config)
    try:
        modules = _modules(folder)
        if not modules:
            return EmbeddingFolder(("lasttoken" if is_causal else "mean",), (None,), is_causal=is_causal)
        poolings, steps = _after_the_model(folder, modules)
        sizes = json_object(folder / "sentence_bert_config.json") or {}
        prompts = json_object(folder / "config_sentence_transformers.json") or {}
        longest = sizes.get("max_seq_length")
        return EmbeddingFolder(
            poolings,
            steps,
            max_tokens=int(longest) if longest else None,
            prompts={str(name): str(text) for name, text in (prompts.get("prompts") or {}).items()},
            default_prompt=prompts.get("default_prompt_name"),
            lowercases=bool(sizes.get("do_lower_case")),
            is_causal=is_causal,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadModelFolder(
            f"{folder}: a file of sentence-transformers has an invalid value: {error!r}", param=MODULES
        ) from error


def check_generates(folder: Path) -> None:
    """Raises ``BadModelFolder`` for an embedding model that cannot generate text, such as an encoder."""
    config = json_object(folder / "config.json") or {}
    names = [str(name) for name in _architectures(config)]
    encodes = any(name.endswith(("Model", "ForMaskedLM")) and name not in DECODERS for name in names)
    if encodes and not _is_causal(config):
        raise BadModelFolder(
            f"{folder}: its architecture is {', '.join(names)}, which makes embeddings and cannot generate "
            "text: serve it with --task embed",
            param="task",
        )


def module_files(folder: Path) -> list[str]:
    """Returns the files of the modules after the model, as paths relative to the folder."""
    found = []
    for module in _modules(folder):
        kind, path = _kind(module), str(module.get("path") or "")
        if path and kind in ("Pooling", "Dense"):
            found.append(f"{path}/config.json")
        if path and kind == "Dense":
            found.append(f"{path}/model.safetensors")
    return found


def _is_causal(config: Mapping[str, Any]) -> bool:
    names = _architectures(config)
    is_decoder = any("ForCausalLM" in str(name) or "LMHead" in str(name) for name in names)
    is_decoder |= any(name in DECODERS for name in names)
    sees_all = config.get("use_bidirectional_attention") or config.get("is_causal") is False
    return is_decoder and not sees_all


def _architectures(config: Mapping[str, Any]) -> list[Any]:
    names = config.get("architectures") or []
    return names if isinstance(names, list) else [names]


DECODERS: Final = frozenset({"Qwen2Model", "Qwen3Model", "MistralModel", "LlamaModel"})
"""Decoders without a head: embedding models are saved under these names."""


def _modules(folder: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads((folder / MODULES).read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise BadModelFolder(f"{folder / MODULES} cannot be read: {error}", param=MODULES) from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise BadModelFolder(f"{folder / MODULES} must be a list of objects", param=MODULES)
    return modules


def _kind(module: Mapping[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]


def _after_the_model(
    folder: Path, modules: list[dict[str, Any]]
) -> tuple[tuple[Pooling, ...], tuple[DenseLayer | None, ...]]:
    kinds = [_kind(module) for module in modules]
    known = {"Dense", "Normalize"}
    if kinds[:2] != ["Transformer", "Pooling"] or not known.issuperset(kinds[2:]):
        raise BadModelFolder(
            f"{folder}: its modules are {', '.join(kinds) or 'none'}; supported are Transformer, Pooling, "
            "then Dense and Normalize",
            param=MODULES,
        )
    if modules[0].get("path"):
        raise BadModelFolder(
            f"{folder}: its model is in {modules[0]['path']}, not in the folder itself", param=MODULES
        )
    poolings = _poolings(folder / str(modules[1].get("path") or "."))
    steps = [
        None if kind == "Normalize" else _dense(folder / str(module["path"]))
        for kind, module in zip(kinds[2:], modules[2:], strict=True)
    ]
    return poolings, tuple(steps)


def _poolings(folder: Path) -> tuple[Pooling, ...]:
    config = _config(folder)
    if config.get("include_prompt") is False:
        raise BadModelFolder(
            f"{folder}: its pooling leaves out the tokens of prompts, which is not supported",
            param="include_prompt",
        )
    named = config.get("pooling_mode")
    named = [named] if isinstance(named, str) else named
    if named is None:
        named = [mode for flag, mode in _FLAGS.items() if config.get(flag)]
    unknown = [str(mode) for mode in named if mode not in get_args(Pooling)]
    if unknown or not named:
        raise BadModelFolder(
            f"{folder}: the pooling {', '.join(unknown) or 'of no kind'} is not supported",
            param="pooling_mode",
        )
    return tuple(named)


def _dense(folder: Path) -> DenseLayer:
    config = _config(folder)
    if not (folder / "model.safetensors").is_file():
        raise BadModelFolder(f"{folder} has no model.safetensors", param="model.safetensors")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    return DenseLayer(
        folder,
        int(config["in_features"]),
        int(config["out_features"]),
        bool(config.get("bias", True)),
        activation.rpartition(".")[2],
    )


def _config(folder: Path) -> dict[str, Any]:
    config = json_object(folder / "config.json")
    if config is None:
        raise BadModelFolder(f"{folder} has no config.json, which modules.json needs", param="config.json")
    return config
