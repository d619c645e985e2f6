"""docs/guides/coming-from.md: our blocks run and print what the page shows; the others compile."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from support.docs.page_blocks import DOCS, blocks_of, compiled, run_block

import agentflow as af
from agentflow.backends.local import Embedded

PAGE = DOCS / "guides" / "coming-from.md"
OURS = [block for block in blocks_of(PAGE) if block.heading.startswith("agentflow")]
THEIRS = [block for block in blocks_of(PAGE) if not block.heading.startswith("agentflow")]

SCRIPT = {
    "Is it about science?</user><assistant>": "yes",
    "its clarity in one sentence.</user><assistant>": "The sentences are short.",
    "its evidence in one sentence.</user><assistant>": "It names no source.",
    "The sentences are short.\nIt names no source.\nSum that up.</user><assistant>": (
        "Clear, but without evidence."
    ),
    "What do plants live on?</user><assistant>": "Light, water and air.",
    "And animals?</user><assistant>": "Plants, or each other.",
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_our_programs_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Embedded, "connect", af.Scripted(SCRIPT).connect)
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    namespace: dict[str, Any] = {"essay": "Every green leaf is a factory that runs on light."}
    with anyio.fail_after(60):
        for block in OURS:
            await run_block(PAGE, block, namespace)
    assert len(OURS) == 2


def test_every_program_is_there_in_all_four():
    for what in ("a judge", "a chat"):
        found = [block.heading.partition(":")[0] for block in THEIRS + OURS if block.heading.endswith(what)]
        assert found == ["SGLang", "Guidance", "LangChain", "agentflow"]


@pytest.mark.parametrize("block", THEIRS, ids=[block.heading for block in THEIRS])
def test_the_programs_of_others_are_python(block):
    compiled(PAGE, block)
