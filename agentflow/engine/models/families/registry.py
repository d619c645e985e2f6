"""Finds the family of a model folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from agentflow.engine.models.config import (
    DecoderConfig,
    RawConfig,
    architectures_of,
    end_token_ids,
    read_folder,
)
from agentflow.engine.models.families import (
    deepseek,
    gemma,
    gpt2,
    gpt_oss,
    llama,
    mixture,
    olmo,
    phi,
    starcoder,
)
from agentflow.engine.models.families.family import Family
from agentflow.engine.models.rope import inverse_frequencies
from agentflow.engine.models.text_config import text_config
from agentflow.engine.models.weights.packed.scheme import read_scheme
from agentflow.engine.store.embedding_folder import DECODERS
from agentflow.errors import BadModelFolder

FAMILIES: Final[Mapping[str, Family]] = {
    family.architecture: family
    for module in (llama, mixture, gemma, phi, olmo, gpt_oss, deepseek, starcoder, gpt2)
    for family in module.FAMILIES
}
"""The architectures that run natively, by the name in ``config.json``."""


def read_config(folder: Path) -> DecoderConfig:
    """The model's shape. ``UnknownModel`` if there is no folder; ``BadModelFolder`` if the model is not
    supported."""
    raw, generation = read_folder(folder)
    try:
        family = _family_of(raw)
        read_scheme(raw)  # rejects formats that are not read
        shape = family.read(raw)
        inverse_frequencies(shape.rope, shape.rotated_dim)  # its factors must fit the heads
        ends = end_token_ids({**text_config(raw), **raw}, generation)
        return replace(shape, architecture=family.architecture, end_token_ids=ends)
    except BadModelFolder as error:
        raise BadModelFolder(f"{folder}: {error}", param=error.param) from None
    except KeyError as error:
        raise BadModelFolder(
            f"{folder}: config.json does not give {error}", param=str(error.args[0])
        ) from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
        message = f"{folder}: config.json holds a value of the wrong kind: {error}"
        raise BadModelFolder(message, param="config.json") from error


def is_native(folder: Path) -> bool:
    """Whether the folder's architecture has a family. False, too, if it names none."""
    return any(_with_head(name) in FAMILIES for name in architectures_of(read_folder(folder)[0]))


def _with_head(architecture: object) -> str:
    """The architecture as ``FAMILIES`` has it: embedding models are saved without their head."""
    name = str(architecture)
    return name.removesuffix("Model") + "ForCausalLM" if name in DECODERS else name


def _family_of(raw: RawConfig) -> Family:
    names = [_with_head(name) for name in architectures_of(raw)]
    if len(names) == 1 and names[0] in FAMILIES:
        return FAMILIES[names[0]]
    found = ", ".join(map(str, names)) or f"none (model_type {raw.get('model_type')!r})"
    known = ", ".join(FAMILIES)
    raise BadModelFolder(f"its architecture is {found}; only {known} can be run", param="architectures")
