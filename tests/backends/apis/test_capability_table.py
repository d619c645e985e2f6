"""The table of the models behind HTTP APIs."""

from __future__ import annotations

import importlib.util
from datetime import date
from typing import get_args

import msgspec
import pytest
from anthropic.types import ModelParam
from hypothesis import given
from hypothesis import strategies as st
from openai.types import ChatModel
from support.docs.page_blocks import DOCS

from agentflow.backends.apis.capability_table import (
    VENDORS,
    ModelFacts,
    Vendor,
    all_facts,
    capabilities,
    facts_as_markdown,
    is_known,
    model_facts,
)
from agentflow.errors import BadArgument
from agentflow.protocol.sampling import GenParams

EVERY_ROW = [(vendor, facts) for vendor in VENDORS for facts in all_facts(vendor)]
PARAMETERS = {field.name for field in msgspec.structs.fields(GenParams)}


@pytest.mark.parametrize(("vendor", "facts"), EVERY_ROW)
def test_each_row_is_consistent(vendor: Vendor, facts: ModelFacts) -> None:
    for names in (facts.sampling, facts.sampling_reasoning or (), facts.exclusive):
        assert set(names) <= PARAMETERS
    assert {"max_tokens"} <= set(facts.parameters(reasons=True)) <= set(facts.sampling)
    assert set(facts.exclusive) <= set(facts.sampling)
    if facts.reasoning == "by default" and vendor in ("openai", "anthropic"):
        assert facts.reasoning_off
    if facts.reasoning == "always":
        assert not facts.reasoning_off
    limits = [size for size in (facts.default_max_tokens, facts.output, facts.context) if size is not None]
    assert limits == sorted(limits)
    assert vendor != "anthropic" or facts.default_max_tokens is not None


@pytest.mark.parametrize(("vendor", "facts"), EVERY_ROW)
def test_each_name_of_a_row_is_reachable(vendor: Vendor, facts: ModelFacts) -> None:
    for name in facts.names:
        example = name.replace("*", "")
        assert model_facts(vendor, example) is facts, name
        assert is_known(vendor, example)


@pytest.mark.parametrize("vendor", VENDORS)
@given(name=st.text(max_size=40))
def test_an_unknown_name_gets_the_newest_family(vendor: Vendor, name: str) -> None:
    assert model_facts(vendor, f"new{name}") is all_facts(vendor)[0]


@pytest.mark.parametrize("vendor", ["openai", "anthropic"])
def test_an_unknown_name_at_another_address_is_refused_nothing_of_the_api(vendor: Vendor) -> None:
    facts = model_facts(vendor, "anybody/model", is_vendors_own=False)
    known = {name for row in all_facts(vendor) for name in row.sampling}
    assert known - {"max_reasoning_tokens"} <= set(facts.sampling) <= PARAMETERS
    assert facts.reasoning == "never"
    newest = all_facts(vendor)[0]
    assert model_facts(vendor, newest.names[-1], is_vendors_own=False) is newest


@given(
    family=st.sampled_from([name for name in get_args(get_args(ModelParam)[0]) if "-20" not in name]),
    date=st.dates(date(2024, 1, 1), date(2029, 12, 31)),
)
def test_a_dated_snapshot_has_the_facts_of_its_family(family: str, date: date) -> None:
    assert model_facts("anthropic", f"{family}-{date:%Y%m%d}") is model_facts("anthropic", family)


def test_an_unknown_vendor_is_refused() -> None:
    with pytest.raises(BadArgument) as raised:
        model_facts("nobody", "gpt-5")
    assert raised.value.param == "vendor"


def test_the_pinned_clients_name_only_known_models() -> None:
    """A new version of a client lists new models: the table needs a row for them."""
    anthropic = {name for part in get_args(ModelParam) for name in get_args(part)}
    # The table is about text; audio models answer in the chat API too.
    openai = {name for name in get_args(ChatModel) if "audio" not in name and "codex-mini" not in name}
    assert anthropic
    assert openai
    assert {name for name in anthropic if not is_known("anthropic", name)} == set()
    assert {name for name in openai if not is_known("openai", name)} == set()


@pytest.mark.parametrize(
    ("vendor", "model", "accepted", "refused"),
    [
        ("openai", "gpt-6.2-astra", ("max_tokens", "seed"), ("temperature", "top_p", "stop", "logprobs")),
        ("openai", "gpt-5.4-mini", ("temperature", "logprobs"), ("stop", "frequency_penalty")),
        ("openai", "gpt-5.5", ("max_tokens",), ("temperature", "stop")),
        ("openai", "o3-mini", ("max_tokens",), ("temperature", "stop")),
        ("openai", "gpt-4o-mini-2024-07-18", ("temperature", "stop", "logit_bias"), ("top_k",)),
        ("openai", "ft:gpt-4o-2024-08-06:org::1", ("temperature", "stop"), ("top_k",)),
        ("anthropic", "claude-opus-5-5", ("max_tokens", "stop"), ("temperature", "top_p", "top_k", "seed")),
        ("anthropic", "claude-sonnet-4-6", ("temperature", "top_k"), ("seed", "logprobs")),
        ("sglang", "any/model", ("temperature", "top_k", "min_p"), ("stop_regex",)),
        ("generic", "any/model", ("temperature",), ("logit_bias",)),
    ],
)
def test_parameters_of_models(
    vendor: str, model: str, accepted: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    parameters = model_facts(vendor, model).parameters()
    assert set(accepted) <= set(parameters)
    assert not set(refused) & set(parameters)


def test_reasoning_decides_which_parameters_are_accepted() -> None:
    by_default = model_facts("openai", "gpt-5.5")
    assert "temperature" not in by_default.parameters()
    assert "temperature" in by_default.parameters(reasons=False)
    on_request = model_facts("anthropic", "claude-opus-4-5")
    assert "temperature" in on_request.parameters()
    assert "temperature" not in on_request.parameters(reasons=True)


def test_reasoning_decides_whether_tools_are_offered() -> None:
    facts = model_facts("openai", "gpt-5.6-luna")
    assert not facts.offers_tools()
    assert facts.offers_tools(reasons=False)
    assert model_facts("openai", "gpt-4.1").offers_tools()


@pytest.mark.parametrize(
    ("model", "continues"),
    [
        ("claude-fable-5-2", False),
        ("claude-opus-4-6", False),
        ("claude-sonnet-4-5", True),
        ("claude-new", False),
    ],
)
def test_the_newest_claude_families_refuse_a_prefill(model: str, continues: bool) -> None:
    assert model_facts("anthropic", model).continuation is continues


def test_capabilities_follow_the_facts() -> None:
    facts = model_facts("openai", "gpt-4o")
    made = capabilities(facts, "gpt-4o")
    assert (made.model, made.max_context, made.constraints) == ("gpt-4o", 128_000, ("schema",))
    assert (made.logprobs, made.seeds, made.token_ids) == (True, True, False)
    reasoning = capabilities(model_facts("openai", "o3"), "o3")
    assert (reasoning.logprobs, reasoning.images, reasoning.accepts("temperature")) == (False, True, False)
    claude = capabilities(model_facts("anthropic", "claude-opus-4-5"), "claude-opus-4-5")
    assert (claude.seeds, claude.continuation, claude.plain_text) == (False, True, False)
    assert (claude.default_max_tokens, claude.accepts("temperature")) == (64_000, True)


def test_the_page_of_the_docs_has_every_row() -> None:
    spec = importlib.util.spec_from_file_location("api_models_hook", DOCS / "hooks" / "api_models.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    source = (DOCS / "reference" / "api-models.md").read_text(encoding="utf-8")
    written = str(hook.on_page_markdown(source, page=None))
    assert facts_as_markdown() in written
    rows = [line for line in written.splitlines() if line.startswith("| ")]
    assert len(rows) == len(EVERY_ROW) + 3 + 2  # and three headers, and other models of two APIs
    assert len({line.count("|") for line in rows}) == 1
    for _, facts in EVERY_ROW:
        assert all(f"`{name}`" in written for name in facts.names if name != "*")
