"""The guide to models behind APIs agrees with the table of models."""

from __future__ import annotations

import re

import pytest
from support.docs.page_blocks import DOCS

from agentflow.backends.apis.capability_table import VENDORS, Vendor, model_facts
from agentflow.backends.apis.chat.flavours import FLAVOURS, OPENAI
from agentflow.protocol.constraint import CONSTRAINT_KINDS
from agentflow.protocol.sampling import GenParams

GUIDE = DOCS.joinpath("guides", "api-models.md").read_text(encoding="utf-8")
SECTIONS: dict[Vendor, str] = {
    "openai": "OpenAI",
    "anthropic": "Anthropic",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "ollama": "Ollama",
    "generic": "Other servers",
}
MODELS: dict[Vendor, str] = {"openai": "gpt-4.1-mini", "anthropic": "claude-opus-5-5"}
"""The model that a vendor's list is about; of Anthropic, one of the newest family."""


def features(vendor: Vendor) -> set[str]:
    """The sampling parameters that the model accepts, and the constraints that its server enforces."""
    facts = model_facts(vendor, MODELS.get(vendor, "m"))
    if vendor == "anthropic":
        return {*facts.parameters(), *facts.constraints, "choices"}
    flavour = OPENAI if vendor == "openai" else FLAVOURS[vendor]
    return {*flavour.accepted(facts), *flavour.enforced(facts)}


def named(section: str, item: str) -> set[str]:
    """The parameters and kinds of constraints in an item of a section's list."""
    text = section.partition(f"- *{item}*")[2].partition("\n- ")[0]
    return set(re.findall(r"`(\w+)`", text)) & {*GenParams.__struct_fields__, *CONSTRAINT_KINDS}


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_section_of_a_vendor_agrees_with_the_table(vendor: Vendor) -> None:
    section = GUIDE.partition(f"\n## {SECTIONS[vendor]}\n")[2].partition("\n## ")[0]
    assert section
    assert named(section, "Supports") <= features(vendor)
    assert not named(section, "Does not") & features(vendor)
