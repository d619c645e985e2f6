"""Prompts with placeholders.

``Hello {{name}}`` has the placeholder ``name``. Values are never searched for placeholders.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from agentflow.protocol.sampling import GenParams
from agentflow.protocol.text.transform import check_written
from agentflow.server.compatible.field_errors import naming_param
from agentflow.server.compatible.sampling import read_stops
from agentflow.server.errors import ApiError, invalid_field
from agentflow.server.programs.program import ProgramInput, ProgramOutput, PromptPiece
from agentflow.server.programs_api.types import (
    NAME,
    PlacedVariable,
    Placeholder,
    ProgramSampling,
    SubmitRequest,
)

_PLACE = re.compile(r"\{\{\s*(" + NAME + r")\s*\}\}")


def read_prompt(body: SubmitRequest) -> tuple[list[PromptPiece], list[PlacedVariable]]:
    """Returns the pieces of the prompt, and the variables of the placeholders in their order. ``ApiError`` if
    they do not fit together."""
    placed = _variables(body.placeholders)
    by_name = {one.name: (number, one) for number, one in enumerate(body.placeholders)}
    shown = _PLACE.split(body.prompt)
    counts = dict.fromkeys(by_name, 0)
    pieces: list[PromptPiece] = []
    for index, text in enumerate(shown):
        if index % 2 == 0:
            if text:
                pieces.append(text)
            continue
        if text not in by_name:
            raise invalid_field("prompt", f"it has {{{{{text}}}}}, which is not among the placeholders")
        counts[text] += 1
        number, placeholder = by_name[text]
        if counts[text] > 1 and placeholder.in_out == "out":
            raise invalid_field("prompt", f"it has the output {{{{{text}}}}} twice")
        pieces.append(_piece(placeholder, placed[number].semantic_var_id, f"placeholders[{number}]"))
    for number, placeholder in enumerate(body.placeholders):
        if not counts[placeholder.name]:
            raise invalid_field(f"placeholders[{number}].name", "it is not in the prompt")
    return pieces, placed


def _variables(placeholders: Sequence[Placeholder]) -> list[PlacedVariable]:
    """The variables of the placeholders. Two may be the same only if both are inputs."""
    placed: list[PlacedVariable] = []
    outputs: set[str] = set()
    for number, one in enumerate(placeholders):
        variable_id = one.semantic_var_id or f"var_{secrets.token_hex(12)}"
        if one.name in [other.name for other in placed]:
            raise invalid_field(f"placeholders[{number}].name", "two placeholders have this name")
        is_known = variable_id in [other.semantic_var_id for other in placed]
        if is_known and (one.in_out == "out" or variable_id in outputs):
            text = "this variable is an output of the request, so no other placeholder may have it"
            raise invalid_field(f"placeholders[{number}].semantic_var_id", text)
        if one.in_out == "out":
            outputs.add(variable_id)
        elif one.sampling_params is not None:
            raise invalid_field(f"placeholders[{number}].sampling_params", "only outputs have them")
        elif one.semantic_var_id is None:
            raise invalid_field(f"placeholders[{number}].semantic_var_id", "an input needs a variable")
        placed.append(PlacedVariable(name=one.name, semantic_var_id=variable_id))
    if not outputs:
        raise invalid_field("placeholders", "there is no output")
    return placed


def _piece(placeholder: Placeholder, variable_id: str, param: str) -> ProgramInput | ProgramOutput:
    transforms = tuple(placeholder.transforms or ())
    for number, transform in enumerate(transforms):
        with naming_param(f"{param}.transforms[{number}]"):
            check_written((transform,))
    if placeholder.in_out == "in":
        return ProgramInput(variable_id, transforms)
    try:
        with naming_param():
            params = _params(placeholder.sampling_params or ProgramSampling()).check()
    except ApiError as error:
        error.param = f"{param}.sampling_params.{error.param}"
        raise
    return ProgramOutput(variable_id, params, transforms)


def _params(asked: ProgramSampling) -> GenParams:
    return GenParams(
        max_tokens=asked.max_tokens,
        min_tokens=asked.min_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=None if asked.top_k is None else max(asked.top_k, 0),
        min_p=asked.min_p,
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        repetition_penalty=asked.repetition_penalty,
        seed=asked.seed,
        stop=read_stops(asked.stop),
    )
