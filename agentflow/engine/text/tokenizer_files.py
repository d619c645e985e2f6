"""Reads the description of a model's tokenizer and chat template: the text files of its folder, or the
metadata of its GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentflow.engine.store.gguf.file import find_gguf, open_gguf
from agentflow.engine.store.gguf.tokenizer import tokenizer_spec
from agentflow.engine.store.model_folder import read_object, read_text
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


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """Returns the object in ``tokenizer.json``. Raises ``BadModelFolder``."""
    if (gguf := find_gguf(folder)) is not None:
        return tokenizer_spec(open_gguf(gguf).vocabulary)
    spec = read_object(folder / "tokenizer.json")
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
        config = read_object(folder / file_name) or {}
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
    source = read_text(folder / "chat_template.jinja")
    if source is not None:
        return source
    for file_name in ("chat_template.json", "tokenizer_config.json"):
        found = (read_object(folder / file_name) or {}).get("chat_template")
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
