"""The bytes that each token of a vocabulary stands for, read off the tokenizer's decoder.

Two families are known: byte-level BPE, which writes each byte as one printable character (the alphabet
of GPT-2), and SentencePiece-style BPE with byte fallback, which writes a space as ``▁`` and a byte that
is in no other token as ``<0xNN>``. In both a text is the concatenation of its tokens' bytes; the second
puts one space in front of a text when it encodes, and takes it away again when it decodes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentflow.errors import BadModelFolder

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Which character stands for which byte: printable bytes for themselves, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """How a token's written form becomes bytes. ``byte_level``: in the GPT-2 alphabet, otherwise
    SentencePiece-style. ``stripped_spaces``: spaces that decoding takes from the front of a text."""

    byte_level: bool
    stripped_spaces: int

    def to_bytes(self, token: str) -> bytes:
        """The bytes of a token that is not special."""
        if not self.byte_level:
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token, which is written as it is
            return token.encode()


def read_decoder(spec: Mapping[str, Any] | None, where: str) -> TokenDecoder:
    """The decoder of a ``tokenizer.json``. Raises ``BadModelFolder`` naming one of another family."""
    parts = _flat(spec)
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return TokenDecoder(byte_level=True, stripped_spaces=0)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        is_space = parts[0].get("pattern") == {"String": "▁"} and parts[0].get("content") == " "
        strip: Mapping[str, Any] = parts[3] if len(parts) == 4 else {"content": " ", "start": 0, "stop": 0}
        if is_space and strip.get("content") == " " and strip.get("stop") == 0:
            return TokenDecoder(byte_level=False, stripped_spaces=int(strip.get("start", 0)))
    raise BadModelFolder(
        f"{where} decodes with {' + '.join(map(str, kinds)) or 'nothing'}; known are byte-level BPE "
        "(ByteLevel) and SentencePiece-style BPE with byte fallback (Replace + ByteFallback + Fuse + Strip)"
    )


def _flat(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if spec is None:
        return []
    if spec.get("type") != "Sequence":
        return [spec]
    return [part for child in spec.get("decoders", []) for part in _flat(child)]
