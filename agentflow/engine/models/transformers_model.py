"""Runs causal models of transformers that have no family here, on the paged KV pool of the other models.

transformers computes everything except attention: its models call the attention function that their config
selects. The function registered here writes keys and values to the pool and attends to it
(``attention.masked_attention``). This is slower than a family: weights are not packed, and each layer runs in
Python.

A model can run this way if only attention combines its tokens, with the same number and size of KV heads in
each layer, and if it computes each token at the position that it is given. A first forward pass, of a few
tokens, checks this, and compares the first layer with the tokens in another order. Code in the model's folder
never runs.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from agentflow.engine.models.config import RawConfig, end_token_ids, read_architectures, read_folder
from agentflow.errors import BadModelFolder
from agentflow.kernels.attention.backend import AttentionRule
from agentflow.kernels.attention.groups import MaskedPlans
from agentflow.kernels.attention.masked_attention import masked_attention
from agentflow.kernels.inputs import ForwardInput, IntArray
from agentflow.kernels.platforms import Kernels

logger = logging.getLogger(__name__)

NAME: Final = "agentflow_paged"
"""The name under which transformers finds the attention function."""
DEFAULT_CONTEXT: Final = 2048
"""The longest sequence of a model whose config has no limit."""
_PROBE_LEN = 6
_MAX_CHANGE = 0.01
"""The largest relative change of a token's queries, keys and values in the first layer if the tokens of the
probe come in another order. They are equal but for rounding."""


@dataclass(frozen=True, slots=True)
class _Call:
    """The sizes that a layer passed to the attention function."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int


class _Forward:
    """The data of one forward pass for the attention function."""

    def __init__(self, given: ForwardInput, device: torch.device) -> None:
        self.given = given
        self.write_slots = torch.from_numpy(given.write_slots).to(device)
        self.plans = MaskedPlans(given.plan, device)


class _Stopped(Exception):
    """The forward pass of a probe has computed all that the probe needs."""


class _Probe:
    """A first forward pass, in which no token attends to another: collects the calls, by layer.
    ``stops``: raises ``_Stopped`` in the first layer."""

    def __init__(self, stops: bool = False) -> None:
        self.stops = stops
        self.calls: dict[int, _Call] = {}
        self.num_calls = 0
        self.has_mask = False
        self.first: tuple[Tensor, ...] = ()  # queries, keys and values of the first layer, [heads, T, dim]


# The forward pass of this thread: transformers does not pass our arguments down to all attention layers.
_current = threading.local()


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function, as transformers calls it.

    Args:
        module: the attention layer.
        query: [1, heads, T, head_dim].
        key: [1, kv_heads, T, head_dim].
        value: [1, kv_heads, T, value_dim].
        attention_mask: None; the plan of the forward pass decides which keys a row sees.
        scaling: of the scores; None: ``head_dim ** -0.5``.
        sliding_window: the tokens that a row sees; None: all.
        softcap: the cap of the scores; None: no cap.
        s_aux: the sinks, [heads].

    Returns:
        [1, T, heads, value_dim], and None for the weights.
    """
    forward = _current.forward
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(forward, _Probe):
        forward.num_calls += 1
        forward.has_mask |= attention_mask is not None
        forward.first = forward.first or (query[0], key[0], value[0])
        if forward.stops:
            raise _Stopped
        forward.calls[layer] = _Call(key.shape[1], key.shape[-1], value.shape[-1], int(sliding_window or 0))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    kv_layer = forward.given.kv_layers[layer]
    # [T, 2, kv_heads, head_dim]
    kv = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)
    kv_layer.index_copy_(0, forward.write_slots, kv.contiguous())
    queries = query[0].transpose(0, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale, int(sliding_window or 0), float(softcap or 0.0))
    attended = masked_attention(queries, kv_layer, forward.plans.of(rule.window), rule, s_aux)
    return attended.view(1, queries.shape[0], queries.shape[1], -1), None


class TransformersModel:
    """A causal model of transformers. Its "hidden states" are logits, because the model includes its head.

    ``num_layers``, ``num_kv_heads``, ``head_dim``: the shape of the KV pool that it needs."""

    def __init__(self, model: Any, kernels: Kernels, raw: RawConfig, generation: RawConfig) -> None:
        self._model = model
        self._kernels = kernels
        self._device = next(model.parameters()).device
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.nbytes = sum(parameter.nbytes for parameter in model.parameters())
        calls, logits = self._probe()
        config = model.config.get_text_config()
        _check_windows(config, calls)
        self.num_layers = len(calls)
        self.num_kv_heads, self.head_dim = calls[0].num_kv_heads, calls[0].head_dim
        self.vocab_size = int(logits.shape[-1])
        context = int(getattr(config, "max_position_embeddings", 0) or DEFAULT_CONTEXT)
        self.max_context = min([context, *_longrope_contexts(config)])
        if self.max_context < 1:
            raise BadModelFolder(
                f"its max_position_embeddings is {self.max_context}", param="max_position_embeddings"
            )
        self.end_token_ids = end_token_ids(raw, generation)

    def forward(self, given: ForwardInput) -> Tensor:
        """Computes T tokens and writes their KV. Returns the logits of ``given.rows``: [S, vocab_size]."""
        forward = _Forward(given, self._device)
        return self._logits(forward, given.token_ids, given.positions, given.rows).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the argument: ``forward`` computes the logits."""
        return hidden

    def _logits(
        self, forward: _Forward | _Probe, token_ids: IntArray, positions: IntArray | None, rows: IntArray
    ) -> Tensor:
        """Without ``positions``, the model numbers the tokens."""
        given = None if positions is None else torch.from_numpy(positions).to(self._device).unsqueeze(0)
        kept = torch.from_numpy(rows).to(self._device)
        _current.forward = forward
        try:
            logits: Tensor = self._model(
                input_ids=torch.from_numpy(token_ids).to(self._device).unsqueeze(0),
                use_cache=False,
                **({} if given is None else {"position_ids": given}),
                **({"logits_to_keep": kept} if self._keeps_rows else {}),
            ).logits[0]
        finally:
            _current.forward = None
        return logits if self._keeps_rows else logits.index_select(0, kept)

    @torch.inference_mode()
    def _probe(self) -> tuple[list[_Call], Tensor]:
        """Runs a forward pass of a few tokens. Returns the call of each layer, and the logits."""
        config = self._model.config.get_text_config()
        probe, places = _Probe(), np.arange(_PROBE_LEN)
        token_ids = _probe_tokens(config)
        logits = self._logits(probe, token_ids, None, places)
        num_layers = int(config.num_hidden_layers)
        if sorted(probe.calls) != list(range(num_layers)) or probe.num_calls != num_layers:
            raise BadModelFolder(
                f"only {len(probe.calls)} of its {num_layers} layers are attention that can be paged",
                param="architectures",
            )
        calls = [probe.calls[i] for i in range(num_layers)]
        if len({(call.num_kv_heads, call.head_dim, call.value_dim) for call in calls}) > 1:
            raise BadModelFolder("its layers differ in their KV heads", param="architectures")
        if calls[0].head_dim != calls[0].value_dim:
            raise BadModelFolder(
                f"its keys have {calls[0].head_dim} dimensions and its values {calls[0].value_dim}",
                param="architectures",
            )
        if probe.has_mask:
            raise BadModelFolder("its attention has a separate mask", param="architectures")
        turned = _Probe(stops=True)
        with suppress(_Stopped):
            self._logits(turned, np.ascontiguousarray(token_ids[::-1]), places[::-1].copy(), places)
        for left, right in zip(probe.first, turned.first, strict=True):
            difference = (left.float() - right.float().flip(1)).norm()
            if bool(difference > _MAX_CHANGE * left.float().norm()):
                raise BadModelFolder(
                    "its tokens are not at the positions that they are given", param="architectures"
                )
        return calls, logits


def _probe_tokens(config: Any) -> IntArray:
    """Returns different tokens without the one for padding, which some models do not count."""
    known = np.arange(min(int(getattr(config, "vocab_size", 1)), 2 * _PROBE_LEN))
    padding = getattr(config, "pad_token_id", None)
    return np.resize(known[known != padding] if len(known) > 1 else known, _PROBE_LEN)


def _check_windows(config: Any, calls: list[_Call]) -> None:
    """Rejects a model that passes its sliding windows to attention only as masks: none are made here."""
    window = getattr(config, "sliding_window", None)
    kinds = list(getattr(config, "layer_types", None) or [])
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise BadModelFolder(
            f"layers of the kind {', '.join(map(str, unknown))} are not supported", param="layer_types"
        )
    expected = [bool(window) and kind == "sliding_attention" for kind in kinds]
    found = [bool(call.window) for call in calls]
    if (kinds and found != expected) or (not kinds and window and not any(found) and _slides(config)):
        raise BadModelFolder(
            "its attention layers do not receive the sliding window of its config", param="sliding_window"
        )


def _longrope_contexts(config: Any) -> Iterator[int]:
    """Yields the tokens up to which each rope of the type "longrope" has the same frequencies. transformers
    chooses them for a whole forward pass, by its largest position: longer texts would change the keys of the
    requests next to them, and their cached keys would have other frequencies than their new ones."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):  # one rope, or one for each kind of layer
        if isinstance(rope, Mapping) and "longrope" in (rope.get("rope_type"), rope.get("type")):
            name = "original_max_position_embeddings"
            if original := rope.get(name) or getattr(config, name, None):
                yield int(original)


def _slides(config: Any) -> bool:
    return bool(getattr(config, "use_sliding_window", True))


@contextmanager
def without_reports() -> Iterator[None]:
    """Turns off the progress bars and log messages of transformers: problems are raised as errors."""
    import transformers

    reports: Any = transformers.utils.logging
    level, has_bars = reports.get_verbosity(), reports.is_progress_bar_enabled()
    reports.set_verbosity(logging.CRITICAL)
    reports.disable_progress_bar()
    try:
        yield
    finally:
        reports.set_verbosity(level)
        if has_bars:
            reports.enable_progress_bar()


def pretrained(kind: Any, folder: Path, config: Any, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """Loads a model from its safetensors with ``kind``, a class of transformers. Returns the model and
    transformers' report on its tensors. Does not run code of the folder. Raises the errors of
    transformers."""
    loaded: tuple[Any, Any] = kind.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        trust_remote_code=False,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    return loaded


def pretrained_config(folder: Path, wrong: str) -> Any:
    """Returns the config of a model. Raises ``ValueError(wrong)`` if it has both an encoder and a decoder."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(wrong)
    return config


def check_complete(folder: Path, missing: Iterable[str]) -> None:
    """Raises ``BadModelFolder`` if tensors are missing: transformers initialises them randomly."""
    name = min(missing, default=None)
    if name is not None:
        raise BadModelFolder(
            f"{folder} has no tensor {name}: its weights are incomplete, fetch the model again", param=name
        )


def _check_loaded(folder: Path, loading: Mapping[str, Any]) -> None:
    """Raises ``BadModelFolder`` unless the files have each tensor of the model."""
    check_complete(folder, loading["missing_keys"])
    if misshapen := sorted(loading["mismatched_keys"]):
        name, stored, expected = misshapen[0]
        raise BadModelFolder(
            f"{folder}: tensor {name} is {tuple(stored)}, but its config makes it {tuple(expected)}: take "
            "the config and the weights of one model",
            param=name,
        )


def one_line(error: Exception) -> str:
    """Returns the first line of an error, and the second if the first ends with a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    shown = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), "")
    return shown or type(error).__name__


def _names_in_transformers(architectures: list[Any], raw: RawConfig) -> list[str]:
    """Returns the architectures by their names in transformers: some configs have other capitals
    (PhiMoEForCausalLM)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(raw.get("model_type")), ""))
    return [known if str(name).lower() == known.lower() else str(name) for name in architectures]


def load_transformers(
    folder: Path, *, dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> TransformersModel:
    """Loads the causal model of ``folder``. Raises ``BadModelFolder`` if transformers is not installed or
    does not know the architecture, or if the model cannot run on a paged KV pool."""
    raw, generation = read_folder(folder)
    architectures = read_architectures(raw)
    if not architectures:
        raise BadModelFolder(
            f"{folder}: config.json has no architectures (model_type {raw.get('model_type')!r})",
            param="architectures",
        )
    architecture = ", ".join(map(str, architectures))
    if importlib.util.find_spec("transformers") is None:
        raise BadModelFolder(
            f"{folder}: its architecture is {architecture}, which needs transformers: "
            "pip install 'agentflow-lm[transformers]'",
            param="architectures",
        )
    import transformers
    from transformers import AttentionInterface, AutoModelForCausalLM

    architectures = _names_in_transformers(architectures, raw)
    if not any(hasattr(transformers, name) for name in architectures):
        if "auto_map" in raw:
            raise BadModelFolder(
                f"{folder}: its architecture is {architecture}, which needs the Python code in the folder "
                "(auto_map in config.json), and that is never run: take a model whose architecture "
                "transformers has",
                param="auto_map",
            )
        raise BadModelFolder(
            f"{folder}: its architecture is {architecture}, which transformers {transformers.__version__} "
            "does not have: upgrade transformers, or take another model",
            param="architectures",
        )
    AttentionInterface.register(NAME, paged_attention)
    try:
        with without_reports():
            config = pretrained_config(folder, "it is not a causal model")
            model, loading = pretrained(
                AutoModelForCausalLM,
                folder,
                config,
                dtype,
                attn_implementation=NAME,
                ignore_mismatched_sizes=True,  # ``_check_loaded`` reports them
            )
            if type(model).__name__ not in architectures:
                raise ValueError(f"for its model_type, transformers loads {type(model).__name__}")
            made = TransformersModel(model.to(device).eval(), kernels, raw, generation)
    except BadModelFolder as error:
        raise BadModelFolder(
            f"{folder}: its architecture is {architecture}, which cannot be run: {error}; take another model",
            param=error.param,
        ) from None
    except KeyError as error:
        raise BadModelFolder(
            f"{folder}: its architecture is {architecture}, whose attention cannot be replaced "
            f"(transformers does not find {error})",
            param="architectures",
        ) from error
    except Exception as error:  # transformers has no common error type
        raise BadModelFolder(
            f"{folder}: its architecture is {architecture}, which cannot be run: {one_line(error)}",
            param="architectures",
        ) from error
    _check_loaded(folder, loading)
    logger.warning(
        "%s runs through transformers, because it has no native kernels here: it is slower than the native "
        "architectures",
        architecture,
    )
    return made
