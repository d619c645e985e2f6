"""The differences between the servers of OpenAI's API: the names of fields, and the features beyond it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from agentflow.backends.apis.capability_table import EmbeddingFacts, ModelFacts
from agentflow.backends.apis.grammars.gbnf import gbnf_of_pattern
from agentflow.backends.apis.grammars.lark_grammar import gbnf_of_grammar
from agentflow.backends.apis.grammars.xgrammar_pattern import xgrammar_pattern
from agentflow.backends.apis.strict_schema import Unwrap, enum_schema, strict_schema, unwrapped
from agentflow.errors import NotSupported
from agentflow.protocol.constraint import Constraint, ConstraintKind
from agentflow.protocol.grammars.gbnf import rule_names
from agentflow.protocol.images import MediumKind
from agentflow.protocol.sampling import is_whole

FlavourName = Literal["generic", "vllm", "sglang", "llamacpp", "ollama"]

_OF_OPENAI: Final = (
    "max_tokens",
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
    "stop",
)
_OF_ENGINES: Final = (
    *_OF_OPENAI,
    "min_tokens",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
)


@dataclass(frozen=True)
class Flavour:
    """The fields by which requests to one kind of server use the features in ``ModelFacts``.

    Attributes:
        name: Its name in messages and in ``OpenAICompatible``.
        params: The field of each parameter of ``GenParams``.
        further: Parameters among these that the table of models does not list.
        continuing: The fields that make it continue the assistant's last message.
        has_completions: Whether it continues plain text (``/completions``).
        is_strict: Schemas must be in the subset of ``strict_schema``.
        takes_reasoning: Messages may have their reasoning.
        takes_salt: Requests may have a ``cache_salt``.
        counts_always: Each chunk may report the usage so far.
        seed_bits: The size of a seed; larger ones are cut.
        may_decide: Some of these servers have OpenAI's endpoint for decisions.
        awaits_cache: Branches of a fork wait until the first one's answer has begun, and the cache has their
            prefix.
        least_logprobs: The fewest log-probabilities of a token that a request for plain text may ask for.
        has_logprobs_with_tools: Requests with tools may ask for log-probabilities.
        embeddings: The limits of models for embeddings that the table does not know.
    """

    name: FlavourName | Literal["openai"]
    params: Mapping[str, str]
    further: tuple[str, ...] = ()
    continuing: Mapping[str, Any] = field(default_factory=dict)
    has_completions: bool = True
    is_strict: bool = True
    takes_reasoning: bool = False
    takes_salt: bool = False
    counts_always: bool = False
    seed_bits: int = 31
    may_decide: bool = False
    # Self-hosted servers charge nothing for a prompt, and their schedulers share prefixes by themselves: vLLM
    # enters blocks into its cache when it schedules a request, so that others of the same step share them,
    # and cache-aware policies of SGLang hold requests back that share a prefix with one that begins. A slot
    # of llama.cpp, and so of Ollama, lends its prefix to no other one while it generates. Others may have no
    # cache.
    awaits_cache: bool = False
    least_logprobs: int = 0
    has_logprobs_with_tools: bool = True
    embeddings: EmbeddingFacts = field(default_factory=lambda: EmbeddingFacts(max_inputs=256))

    def accepted(self, facts: ModelFacts, reasons: bool | None = None) -> tuple[str, ...]:
        """The parameters that a request may have; ``reasons`` as in ``ModelFacts.parameters``."""
        known = (*facts.parameters(reasons), *self.further)
        return tuple([name for name in self.params if name in known])

    def enforced(self, facts: ModelFacts) -> tuple[ConstraintKind, ...]:
        """The kinds of constraints that the server enforces: a choice can be a schema."""
        kinds = facts.constraints
        return (*kinds, "choices") if "schema" in kinds and "choices" not in kinds else kinds


def _same(*names: str, **renamed: str) -> dict[str, str]:
    return {name: name for name in names} | renamed


_CONTINUED: Final = {"continue_final_message": True, "add_generation_prompt": False}
OPENAI: Final = Flavour(
    "openai",
    _same(*_OF_OPENAI),
    has_completions=False,
    seed_bits=63,
    awaits_cache=True,
)
FLAVOURS: Final[dict[str, Flavour]] = {
    # Some servers accept 32 texts by default, and numbers alone.
    "generic": Flavour(
        "generic", _same(*_OF_OPENAI), embeddings=EmbeddingFacts(max_inputs=32, encoding="float")
    ),
    "vllm": Flavour(
        "vllm",
        _same(*_OF_ENGINES, max_reasoning_tokens="thinking_token_budget"),
        further=("max_reasoning_tokens",),
        continuing=_CONTINUED,
        is_strict=False,
        takes_reasoning=True,
        takes_salt=True,
        counts_always=True,
        seed_bits=63,
        may_decide=True,  # this project's server has these fields, too
    ),
    "sglang": Flavour(
        "sglang",
        _same(*_OF_ENGINES, "stop_regex"),
        further=("stop_regex",),
        continuing=_CONTINUED,
        is_strict=False,
        takes_reasoning=True,
        takes_salt=True,
        counts_always=True,
        seed_bits=63,
        may_decide=True,
    ),
    "llamacpp": Flavour(
        "llamacpp",
        _same(*_OF_OPENAI, "top_k", "min_p", "ignore_eos", repetition_penalty="repeat_penalty"),
        continuing=_CONTINUED,  # otherwise it also continues the message, and repeats it in the answer
        is_strict=False,
        takes_reasoning=True,
        least_logprobs=1,
        has_logprobs_with_tools=False,
    ),
    "ollama": Flavour("ollama", _same(*_OF_OPENAI), has_completions=False, is_strict=False),
}

CONTEXT_FIELDS: Final = ("context_length", "max_model_len", "context_window", "max_context_length")
"""The fields of a model's context in the lists of servers. OpenAI's API has none."""

MAX_CONTEXT: Final = 1 << 40

# The owners of models in the lists of servers. Our own server has vLLM's fields.
_OWNERS: Final = {
    "agentflow": "vllm",
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llamacpp",
    "library": "ollama",
}


def listed_fields(found: Any, field: str) -> list[str]:
    """The texts of a field in the rows of a server's answer to ``GET /models``, whatever else is in it.

    >>> listed_fields({"data": [{"id": "Qwen/Qwen3-8B", "owned_by": "vllm"}, {"id": 3}, None]}, "id")
    ['Qwen/Qwen3-8B']
    """
    return [value for row in _rows(found) if isinstance(value := row.get(field), str)]


def _rows(found: Any) -> list[dict[str, Any]]:
    rows = found.get("data") if isinstance(found, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _row(found: Any, model: str) -> dict[str, Any]:
    """The row of a model. A single row stands for any name, as some servers have one model and ignore it."""
    rows = _rows(found)
    return rows[0] if len(rows) == 1 else next((row for row in rows if row.get("id") == model), {})


def lists_embedder(found: Any, model: str) -> bool:
    """Whether a server's answer to ``GET /models`` lists a model as one for embeddings, as agentflow servers
    do."""
    return is_whole(_row(found, model).get("embedding_size"), 1, MAX_CONTEXT)


def listed_media(found: Any, model: str) -> list[MediumKind]:
    """The media that a model accepts by a server's answer to ``GET /models``: in ``input_modalities``, as of
    agentflow servers, or in ``architecture``, as of OpenRouter.

    >>> listed_media({"data": [{"id": "m", "input_modalities": ["text", "image"]}]}, "m")
    ['image']
    """
    row = _row(found, model)
    inner = row.get("architecture")
    for place in (row, inner if isinstance(inner, dict) else {}):
        if isinstance(named := place.get("input_modalities"), list):
            return [kind for kind in get_args(MediumKind) if kind in named]
    return []


def listed_context(found: Any, model: str) -> int | None:
    """The context of a model in a server's answer to ``GET /models``, in tokens; None if it is not there.

    >>> listed_context({"data": [{"id": "Qwen/Qwen3-8B", "max_model_len": 40_960}]}, "Qwen/Qwen3-8B")
    40960
    """
    row = _row(found, model)
    meta = row.get("meta")  # llama.cpp's; a router of its servers reports 0
    values = [row.get(name) for name in CONTEXT_FIELDS] + [
        meta.get("n_ctx") if isinstance(meta, dict) else None
    ]
    return next((value for value in values if is_whole(value, 1, MAX_CONTEXT)), None)


def shown_context(found: Any) -> int | None:
    """The context of a model in Ollama's answer to ``/api/show``: ``num_ctx``, if the model's file sets it,
    and otherwise the longest that the model can have, in tokens; None if neither is there.

    >>> shown_context({"parameters": "num_ctx 8192", "model_info": {"qwen3.context_length": 40_960}})
    8192
    """
    if not isinstance(found, dict):
        return None
    info, parameters = found.get("model_info"), found.get("parameters")
    set_in_file = (
        re.search(r"^num_ctx\s+(\d{1,9})\s*$", parameters, re.M) if isinstance(parameters, str) else None
    )
    items = info.items() if isinstance(info, dict) else ()
    values = [int(set_in_file[1])] if set_in_file else []
    values += [value for name, value in items if name.endswith(".context_length")]
    return min([value for value in values if is_whole(value, 1, MAX_CONTEXT)], default=None)


def detect_flavour(models: Any) -> Flavour:
    """The flavour of the server that answers ``GET /models`` with ``models``.

    >>> detect_flavour({"data": [{"id": "Qwen/Qwen3-8B", "owned_by": "vllm"}]}).name
    'vllm'
    """
    owners = listed_fields(models, "owned_by")
    return FLAVOURS[next((_OWNERS[owner] for owner in owners if owner in _OWNERS), "generic")]


class ConstraintFields(NamedTuple):
    """The fields of a request that enforce a constraint. ``unwrap`` takes the text out of the answer, if the
    server puts it into an object."""

    fields: dict[str, Any]
    unwrap: Unwrap | None = None


def constraint_fields(
    flavour: Flavour,
    enforced: Sequence[ConstraintKind],
    constraint: Constraint | None,
    *,
    is_plain: bool = False,
) -> ConstraintFields:
    """The fields of a request that express a constraint. ``NotSupported`` if its kind is not ``enforced``.

    Args:
        flavour: The kind of server.
        enforced: The kinds of constraints that the server enforces.
        constraint: The constraint.
        is_plain: The request continues a plain text.

    >>> constraint_fields(FLAVOURS["vllm"], ["regex"], Constraint("regex", "[0-9]+")).fields
    {'structured_outputs': {'regex': '[0-9]+'}}
    """
    if constraint is None:
        return ConstraintFields({})
    found = constraint.as_one_of(enforced)
    if found is None or constraint.instead is not None:
        raise NotSupported(
            f"the server does not enforce constraints of the kind {constraint.kind!r} (supported: "
            f'{", ".join(enforced) or "none"}): set on_unsupported="retry" to have answers checked and '
            "asked for again"
        )
    if flavour.name == "llamacpp":  # it has its own grammars of numbers
        found = constraint.as_one_of(["schema"]) or found
    constraint = found
    match constraint.kind:
        case "schema" if is_plain:
            return ConstraintFields(_plain_schema_fields(flavour, constraint.source))
        case "schema":
            return _schema_fields(flavour, msgspec.json.decode(constraint.source))
        case "choices" if is_plain and flavour.is_strict:
            raise _no_form_of_text()
        case "choices":
            return _choice_fields(flavour, constraint.choices)
        case "grammar" if flavour.name == "llamacpp":
            return ConstraintFields({"grammar": gbnf_of_grammar(constraint.source)})
        case "grammar" if flavour.name == "sglang":
            return ConstraintFields({"ebnf": gbnf_of_grammar(constraint.source)})
        case "grammar" if "::=" in constraint.source and not rule_names(constraint.source):
            raise NotSupported(
                "the server would read a grammar that contains '::=' as EBNF: write the text as two strings"
            )
        case "regex" if flavour.name == "llamacpp":
            return ConstraintFields({"grammar": gbnf_of_pattern(constraint.source)})
        case "regex" if flavour.name == "sglang":
            return ConstraintFields({"regex": xgrammar_pattern(constraint.source)})
        case "regex":
            return ConstraintFields({"structured_outputs": {"regex": xgrammar_pattern(constraint.source)}})
        case kind:
            return ConstraintFields({"structured_outputs": {kind: constraint.source}})


def _schema_fields(flavour: Flavour, schema: Any) -> ConstraintFields:
    unwrap: Unwrap | None = None
    if flavour.is_strict:
        schema, unwrap = strict_schema(schema if isinstance(schema, dict) else {})
    return ConstraintFields({"response_format": _response_format(schema)}, unwrap)


def _plain_schema_fields(flavour: Flavour, source: str) -> dict[str, Any]:
    """The field of a schema where there is no ``response_format``."""
    match flavour.name:
        case "vllm":
            return {"structured_outputs": {"json": msgspec.json.decode(source)}}
        case "sglang":
            return {"json_schema": source}
        case "llamacpp":
            return {"json_schema": msgspec.json.decode(source)}
        case _:
            raise _no_form_of_text()


def _no_form_of_text() -> NotSupported:
    return NotSupported("the server constrains turns only: put the gen into af.assistant(…), after a turn")


def _response_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _choice_fields(flavour: Flavour, choices: tuple[str, ...]) -> ConstraintFields:
    match flavour.name:
        case "vllm":
            return ConstraintFields({"structured_outputs": {"choice": list(choices)}})
        case "sglang":
            return ConstraintFields({"regex": "(" + "|".join(map(_literal, choices)) + ")"})
        case "llamacpp":
            return ConstraintFields({"grammar": "root ::= " + " | ".join(map(_gbnf_literal, choices))})
        case _:
            fields = {"response_format": _response_format(enum_schema(choices))}
            return ConstraintFields(fields, lambda text: _text_of_string(unwrapped(text)))


def _literal(text: str) -> str:
    """A pattern that matches the text. Only the characters that need it are escaped: the grammar backends
    know fewer escapes than Python."""
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text)


def _gbnf_literal(text: str) -> str:
    """A text in llama.cpp's notation, which has fewer short escapes than JSON."""
    return '"' + re.sub(r'[\x00-\x1f"\\]', lambda found: f"\\x{ord(found[0]):02x}", text) + '"'


def _text_of_string(text: str) -> str:
    """The text of a JSON string. An incomplete string is returned unchanged, which is no choice."""
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return text
