"""Reads the description of a model's tokenizer and chat template: the text files of its folder, or the
metadata of its GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentflow.engine.store.gguf.file import find_gguf, open_gguf
from agentflow.engine.store.gguf.tokenizer import tokenizer_spec
from agentflow.errors import BadArgument, BadModelFolder

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_file(file: Path) -> str | None:
    """Returns the file's text; None if there is no such file. Raises ``BadModelFolder`` if it cannot be
    read."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BadModelFolder(f"{file} cannot be read: {error}", param=file.name) from error


def read_json(file: Path) -> dict[str, Any] | None:
    """Returns the file's JSON object; None if there is no such file. Raises ``BadModelFolder`` if it is
    invalid."""
    text = read_file(file)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadModelFolder(
            f"{file} is not valid JSON ({error}); fetch the model again", param=file.name
        ) from error
    if not isinstance(value, dict):
        raise BadModelFolder(f"{file} is not a JSON object; fetch the model again", param=file.name)
    return value


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """Returns the object in ``tokenizer.json``. Raises ``BadModelFolder``."""
    if (gguf := find_gguf(folder)) is not None:
        return tokenizer_spec(open_gguf(gguf).vocabulary)
    spec = read_json(folder / "tokenizer.json")
    if spec is None:
        raise BadModelFolder(
            f"{folder} has no tokenizer.json; save the model's tokenizer there in that format "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers does)",
            param="tokenizer.json",
        )
    return spec


def named_special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens by role, such as ``{"bos_token": "<s>"}``. ``tokenizer_config.json``
    overrides ``special_tokens_map.json``."""
    if (gguf := find_gguf(folder)) is not None:
        return open_gguf(gguf).vocabulary.named_tokens
    named: dict[str, str] = {}
    for file_name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = read_json(folder / file_name) or {}
        for name in NAMED_TOKENS:
            if name not in config:
                continue
            token = config[name]
            token = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(token, str):
                named[name] = token
            else:
                named.pop(name, None)
    return named


def given_chat_template(file: str) -> str:
    """Returns the Jinja source in the file of the option ``chat_template``. Raises ``BadArgument``."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadArgument(
            f"chat_template: {file} cannot be read: {why}; give the path of a Jinja file",
            param="chat_template",
        ) from error


def chat_template_source(folder: Path) -> str | None:
    """Returns the Jinja source of the folder's default chat template; None if it has none.

    Taken from the first of ``chat_template.jinja``, ``chat_template.json`` and ``tokenizer_config.json``. In
    the JSON files it is a string or a list of named templates, of which ``default`` is used.
    """
    if (gguf := find_gguf(folder)) is not None:
        return open_gguf(gguf).chat_template
    source = read_file(folder / "chat_template.jinja")
    if source is not None:
        return source
    for file_name in ("chat_template.json", "tokenizer_config.json"):
        found = (read_json(folder / file_name) or {}).get("chat_template")
        if isinstance(found, list):
            named = {
                entry.get("name"): entry.get("template") for entry in found if isinstance(entry, Mapping)
            }
            found = named.get("default")
            if found is None:
                names = ", ".join(sorted(str(name) for name in named)) or "none"
                raise BadModelFolder(
                    f"{folder / file_name} has no chat template named default (it has: {names}); "
                    "save the one to use as chat_template.jinja",
                    param=file_name,
                )
        if isinstance(found, str):
            return found
    return None
