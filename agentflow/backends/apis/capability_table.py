"""The table of the models behind HTTP APIs: which parameters and features each of them accepts.

The facts are in ``models.toml``, with their sources. ``model_facts`` looks a model up, ``capabilities`` makes
the part of them that the session protocol has, and ``facts_as_markdown`` writes the table of the docs.

>>> model_facts("anthropic", "claude-opus-4-5-20251101").continuation
True
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any, Final, Literal, get_args

import msgspec

from agentflow.errors import BadArgument
from agentflow.protocol.constraint import ConstraintKind
from agentflow.protocol.events import Capabilities

Vendor = Literal["openai", "anthropic", "vllm", "sglang", "llamacpp", "ollama", "generic"]
VENDORS: Final[tuple[Vendor, ...]] = get_args(Vendor)
"""The vendors, and the flavours of compatible servers."""


class ModelFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the table. Parameters have the names of ``SamplingParams``."""

    names: tuple[str, ...]  # the models' names, without dates; ``*`` is any text
    # The parameters that may be set while the model does not reason.
    sampling: tuple[str, ...]
    # The parameters that may be set while it reasons; None: the same.
    sampling_reasoning: tuple[str, ...] | None = None
    exclusive: tuple[str, ...] = ()  # at most one of these parameters may be set
    max_temperature: float = 2.0
    max_stops: int | None = None  # the largest number of ``stop`` strings; None: no limit is known
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"  # its name in requests
    default_max_tokens: int | None = None  # sent if the program sets none; None: it may be left out
    chat: bool = True  # the chat API serves the model; False: only OpenAI's responses
    continuation: bool = False  # the model continues a last message of the assistant
    constraints: tuple[ConstraintKind, ...] = ()  # the kinds that the server enforces on a text
    tools: Literal["always", "unless reasoning", "never"] = "always"  # may be offered in the chat API
    required_calls: bool = True  # a request may require a tool call, or a call of one tool
    images: bool = False
    inline_system: bool = False  # system messages may stand between other messages
    reasoning: Literal["never", "on request", "by default", "always"] = "never"
    # The value that turns reasoning off: of ``reasoning_effort``, for Anthropic of ``thinking.type``. Empty:
    # it is left out.
    reasoning_off: str = ""
    adaptive: bool = False  # Anthropic: the model chooses how much it reasons, without a budget
    efforts: tuple[str, ...] = ()  # the accepted efforts of reasoning, from the least; empty: none is known
    context: int | None = None  # tokens of prompt and output together; None: unknown
    output: int | None = None  # tokens of the longest output; None: unknown
    decisions: bool = False  # the endpoint for decisions serves the model
    min_cached_tokens: int = 1024  # of the shortest prefix that the vendor caches
    # The known faults of the constraints that the server enforces, in sentences for the docs.
    constraint_faults: tuple[str, ...] = ()

    @property
    def reasons_by_default(self) -> bool:
        """Whether the model reasons if a request does not set reasoning."""
        return self.reasoning in ("by default", "always")

    @property
    def known_to_reason(self) -> bool | None:
        """``reasons_by_default``; None for a model that only the row for all names describes."""
        return None if self.names == ("*",) else self.reasons_by_default

    @property
    def may_stop_reasoning(self) -> bool:
        """Whether the model reasons by default, and a request may turn that off."""
        return self.reasons_by_default and bool(self.reasoning_off)

    def parameters(self, reasons: bool | None = None) -> tuple[str, ...]:
        """The sampling parameters that may be set.

        Args:
            reasons: Whether the model reasons; None: as it does by default.
        """
        if self.reasons_by_default if reasons is None else reasons:
            return self.sampling if self.sampling_reasoning is None else self.sampling_reasoning
        return self.sampling

    def offers_tools(self, reasons: bool | None = None) -> bool:
        """Whether a request of the chat API may have tools; ``reasons`` as in ``parameters``."""
        reasons = self.reasons_by_default if reasons is None else reasons
        return self.tools == "always" or (self.tools == "unless reasoning" and not reasons)


class EmbeddingFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of a model that makes embeddings: one row of the table, or the defaults for a model that is
    not in it."""

    names: tuple[str, ...] = ()
    dimensions: int | None = None  # of its embeddings; None: unknown
    shortens: bool = True  # a request may ask for fewer dimensions
    context: int | None = None  # tokens of one text; None: unknown
    max_inputs: int = 32  # texts of one request
    encoding: Literal["base64", "float"] = "base64"  # that requests ask for; answers may have either


def embedding_facts(vendor: str, model: str) -> EmbeddingFacts | None:
    """The facts of a model that makes embeddings and generates no text; None if the table has no such model.
    Arguments as in ``model_facts``."""
    rows = [msgspec.convert(row, EmbeddingFacts) for row in _tables()[vendor].get("embeddings", ())]
    return next((facts for facts in rows if _pattern(facts.names).fullmatch(model)), None)


def model_facts(vendor: str, model: str, *, is_vendors_own: bool = True) -> ModelFacts:
    """The facts of a model. A model that is not in the table has the facts of the vendor's newest family.

    Args:
        vendor: ``openai``, ``anthropic``, or the flavour of a compatible server.
        model: The name of the model, as requests have it.
        is_vendors_own: The vendor serves it. Elsewhere, a model that the table does not know is any model:
            it gets all parameters of the API, of which its server refuses the ones that it does not take.

    Raises:
        BadArgument: The vendor is unknown.
    """
    if vendor not in VENDORS:
        raise BadArgument(f"unknown vendor {vendor!r} (known: {', '.join(VENDORS)})", param="vendor")
    rows = _rows()[vendor]
    unknown = rows[0][0] if is_vendors_own else elsewhere_facts(vendor)
    return next((facts for facts, names in rows if names.fullmatch(model)), unknown)


@functools.cache
def elsewhere_facts(vendor: str) -> ModelFacts:
    """The facts of models that the table does not know, at an address that is not the vendor's."""
    content = _tables()[vendor]
    return msgspec.convert(content["defaults"] | content["elsewhere"], ModelFacts)


def is_known(vendor: str, model: str) -> bool:
    """Whether a row of the table has the model's name. Arguments and errors as in ``model_facts``."""
    facts = model_facts(vendor, model)
    return any(_pattern((name,)).fullmatch(model) for name in facts.names)


def capabilities(facts: ModelFacts, model: str, reasons: bool | None = None) -> Capabilities:
    """The features of a model for the session protocol.

    Args:
        facts: The row of the model.
        model: Its name, which errors show.
        reasons: Whether the model always or never reasons; None: gens decide that. Parameters that it accepts
            only while it reasons, or only while it does not, are then among the features.
    """
    states = (True, False) if reasons is None else (reasons,)
    sampling = dict.fromkeys(name for state in states for name in facts.parameters(state))
    if facts.reasoning != "never":
        sampling["max_reasoning_tokens"] = None  # 0 turns reasoning off
    return Capabilities(
        model=model,
        select=False,
        logprobs="logprobs" in sampling,
        seeds="seed" in sampling,
        sampling=tuple(sampling),
        default_max_tokens=facts.default_max_tokens,
        continuation=facts.continuation and not reasons,
        plain_text=False,
        max_context=facts.context,
        constraints=facts.constraints,
        images=facts.images,
        token_ids=False,
        conversations=True,
        reasons=facts.known_to_reason,
    )


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("agentflow.backends.apis").joinpath("models.toml").read_text(encoding="utf-8"))


@functools.cache
def _rows() -> dict[str, list[tuple[ModelFacts, re.Pattern[str]]]]:
    """The rows of each vendor, with the patterns of their names."""
    found: dict[str, list[tuple[ModelFacts, re.Pattern[str]]]] = {}
    for vendor, content in _tables().items():
        rows = [msgspec.convert(content["defaults"] | row, ModelFacts) for row in content["models"]]
        found[vendor] = [(facts, _pattern(facts.names)) for facts in rows]
    return found


def all_facts(vendor: Vendor) -> list[ModelFacts]:
    """The rows of a vendor, in the order of the table."""
    return [facts for facts, _ in _rows()[vendor]]


@functools.lru_cache(maxsize=256)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Matches the names and their snapshots, whatever the case. A fine-tuned ``gpt-4o`` is
    ``ft:gpt-4o-2024-08-06:org::1``."""
    parts = [".*".join(map(re.escape, name.split("*"))) for name in names]
    snapshot = r"(?:[-@](?:\d{4}-?\d\d-?\d\d|latest))?(?:[:@].*)?"
    return re.compile(rf"(?:ft:)?(?:{'|'.join(parts)}){snapshot}", re.IGNORECASE | re.DOTALL)


_TITLES: Final[dict[Vendor, str]] = {
    "openai": "OpenAI",
    "anthropic": "Anthropic",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "ollama": "Ollama",
    "generic": "other servers",
}
_HEADER: Final = (
    "parameters",
    "continues text",
    "constraints",
    "tools",
    "images",
    "reasoning",
    "context",
    "output",
)


def facts_as_markdown() -> str:
    """The table for the docs: one section for each vendor, and one for the compatible servers."""
    lines: list[str] = []
    for vendor in VENDORS[:2]:
        lines += [f"## {_TITLES[vendor]}", "", *_table("models", _vendor_rows(vendor)), ""]
    servers = [(_TITLES[vendor], all_facts(vendor)[0]) for vendor in VENDORS[2:]]
    faults = [f"- *{title}*: {fault}" for title, facts in servers for fault in facts.constraint_faults]
    lines += ["## Compatible servers", "", *_table("server", servers), ""]
    return "\n".join([*lines, "Known faults of the servers' constraints:", "", *faults, ""])


def _vendor_rows(vendor: Vendor) -> list[tuple[str, ModelFacts]]:
    known = [(_names_cell(facts), facts) for facts in all_facts(vendor)]
    return [*known, ("any other, at another address", elsewhere_facts(vendor))]


def _names_cell(facts: ModelFacts) -> str:
    return ", ".join(f"`{name}`" for name in facts.names) + ("" if facts.chat else " (responses API)")


def _table(first: str, rows: Sequence[tuple[str, ModelFacts]]) -> Iterator[str]:
    yield "| " + " | ".join((first, *_HEADER)) + " |"
    yield "|" + "---|" * (len(_HEADER) + 1)
    for title, facts in rows:
        yield "| " + " | ".join((title, *_cells(facts))) + " |"


def _cells(facts: ModelFacts) -> Iterator[str]:
    yield _parameters_cell(facts)
    yield "yes" if facts.continuation else "no"
    yield ", ".join(facts.constraints) or "none"
    tools = {"always": "yes", "never": "no"}.get(facts.tools, facts.tools)
    yield tools if facts.required_calls or tools == "no" else f"{tools}; none can be required"
    yield "yes" if facts.images else "no"
    yield facts.reasoning + (f" ({', '.join(facts.efforts)})" if facts.efforts else "")
    yield "asked" if facts.context is None else f"{facts.context:,}"
    yield "" if facts.output is None else f"{facts.output:,}"


def _parameters_cell(facts: ModelFacts) -> str:
    """The parameters; those that reasoning excludes are in brackets."""
    reasoning = facts.parameters(reasons=True)
    plain = [name for name in facts.sampling if name in reasoning]
    others = [name for name in facts.sampling if name not in reasoning]
    shown = ", ".join(f"`{name}`" for name in plain)
    if others:
        shown += "; without reasoning " + ", ".join(f"`{name}`" for name in others)
    if facts.exclusive:
        shown += "; only one of " + ", ".join(f"`{name}`" for name in facts.exclusive)
    return shown
