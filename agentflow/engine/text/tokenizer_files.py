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
    """Returns the special tokens by role, such as ``{"bos_token": "<s>"}``."""
    return {name: token for name, token in template_tokens(folder).items() if name in NAMED_TOKENS}


def template_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens that a chat template receives by name: ``named_special_tokens``, and tokens
    that only this model has, such as ``image_token``. As in transformers, the roles in
    ``special_tokens_map.json`` override ``tokenizer_config.json`` if that has no ``added_tokens_decoder``."""
    if (gguf := find_gguf(folder)) is not None:
        return open_gguf(gguf).vocabulary.named_tokens
    config = read_object(folder / "tokenizer_config.json") or {}
    older = read_object(folder / "special_tokens_map.json") or {}
    found = _extra_tokens(older)
    for part in (older, config):
        found |= {name: token for name, token in part.items() if name.endswith("_token")}
    found |= _extra_tokens(config)
    if "added_tokens_decoder" not in config:
        found |= _extra_tokens(older) | {name: older[name] for name in NAMED_TOKENS if name in older}
    texts = {
        name: token.get("content") if isinstance(token, Mapping) else token for name, token in found.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _extra_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    extra = config.get("extra_special_tokens")
    return dict(extra) if isinstance(extra, Mapping) else {}


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
