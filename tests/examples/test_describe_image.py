"""Describe image: the questions share the picture, and the typed answer is valid."""

from __future__ import annotations

from pathlib import Path

import pytest
from describe_image import PICTURE, QUESTIONS, Picture, describe, main
from scripted_example import run, scripted, shown

import agentflow as af
from agentflow.protocol.events import Capabilities
from agentflow.protocol.images import image_file

pytestmark = pytest.mark.anyio


def looker(prompt: str) -> str:
    """A model that sees the chart."""
    if "as JSON" in prompt:
        return '{"kind": "chart", "title": "Visitors of the garden"}'
    return next(f"Answer {number}" for number, question in enumerate(QUESTIONS) if question in prompt)


async def test_each_question_is_asked_about_the_picture():
    backend = af.Scripted(looker)
    answers, found = await run(describe, backend, PICTURE, QUESTIONS)
    assert answers == ["Answer 0", "Answer 1", "Answer 2"]
    assert found == Picture("chart", "Visitors of the garden")
    shared = {"type": "image_url", "image_url": {"url": image_file(PICTURE.read_bytes()).url}}
    assert [call.messages[1]["content"][0] for call in backend.calls] == [shared] * 4


async def test_the_answers_are_shown():
    page = await shown(main, scripted(looker))
    assert all(f"Answer {number}" in page for number in range(3))
    assert "Visitors of the garden" in " ".join(page.split())


async def test_a_model_without_vision_is_named():
    backend = scripted(looker)
    backend.generator.capabilities = Capabilities("reader", conversations=True)
    assert "reader accepts no images" in await shown(main, backend)
    assert not backend.calls


def test_the_picture_is_small():
    assert Path(PICTURE).stat().st_size < 10_000
