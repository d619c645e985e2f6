"""Opening the readers of images: models without one, or with settings that cannot be used, serve text."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from agentflow.errors import BadModelFolder
from agentflow.protocol.images import Image, MediumKind, image_file
from agentflow.server.models.open_models import _open_reader
from tests.support.media_files import encoded, noise

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SQUARE = {"size": {"height": 28, "width": 28}}


async def _fetch(url: str, kind: MediumKind, tenant: str) -> Image:
    assert (url, kind) == ("https://a.example/x.png", "image")
    return image_file(encoded(noise(9, 9)))


def _folder(path: Path, model_type: str, preprocessor: Any) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return path


async def test_a_reader_fetches_the_images_of_urls(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        reader = await _open_reader(stack, _folder(tmp_path, "gemma3", SQUARE), _fetch)
        assert reader is not None
        medium = await reader.read_image(Image("https://a.example/x.png"))
        same = await reader.read_image(image_file(encoded(noise(9, 9))))
    assert medium is same


@pytest.mark.parametrize(
    ("model_type", "preprocessor"), [("llama", SQUARE), ("gemma3", {}), ("gemma3", {"do_resize": False})]
)
async def test_other_models_read_no_images(tmp_path: Path, model_type: str, preprocessor: Any) -> None:
    async with AsyncExitStack() as stack:
        assert await _open_reader(stack, _folder(tmp_path, model_type, preprocessor), _fetch) is None
        gguf = tmp_path / "model.gguf"
        writer = GGUFWriter(gguf, "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        assert await _open_reader(stack, gguf, _fetch) is None


async def test_damaged_settings_are_an_error(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        with pytest.raises(BadModelFolder):
            await _open_reader(stack, _folder(tmp_path, "gemma3", []), _fetch)
