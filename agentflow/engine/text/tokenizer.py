"""Converts text to token ids and back, for one model, and strictly separates content from markup.

*Markup* is written by the chat template and trusted: special tokens in it are recognised. *Content* is all
other text: a special token spelled out in it is encoded like any other text, so that a user who types
``<|im_start|>`` does not open a turn. The same applies to every added token, special or not, that the chat
template contains or that marks tool calls: a user's ``<tool_call>`` is text.

Two families are supported. Byte-level BPE writes each byte as one printable character (the alphabet of
GPT-2). SentencePiece-style BPE with byte fallback writes a space as ``▁`` and a byte without a token as
``<0xNN>``. In both, a text is the concatenation of its tokens' bytes (``TokenDecoder``). Some tokenizers put
a space in front of a text before encoding it. A conversation is encoded in pieces, and inner pieces must not
get this space, so the tokenizer is also built without the parts that add it (``without_space_prefix``).
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import tokenizers

from agentflow.engine.store.gguf.file import reading_once
from agentflow.engine.text.channels import CHANNEL_TOKENS, has_channels
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.engine.text.reasoning import reasoning_marks
from agentflow.engine.text.tokenizer_files import named_special_tokens, read_tokenizer
from agentflow.engine.text.tool_format import tool_format
from agentflow.errors import BadArgument, BadModelFolder

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte of each character: printable bytes are unchanged, the others are numbered from
    U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """Converts a token's written form to bytes."""

    byte_level: bool  # the GPT-2 alphabet; otherwise SentencePiece's style
    stripped_spaces: int  # the number of spaces that decoding removes from the front of a text
    word_pieces: bool = False  # tokens that do not begin a word are written with ``##``

    def to_bytes(self, token: str) -> bytes:
        """Returns the bytes of a token that is not special."""
        if self.word_pieces:
            return (token[2:] if token.startswith("##") else f" {token}").encode()
        if not self.byte_level:
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token, written literally
            return token.encode()


def read_decoder(spec: Mapping[str, Any] | None, where: str, *, embeds: bool = False) -> TokenDecoder:
    """Returns the decoder of a ``tokenizer.json``. Raises ``BadModelFolder`` if it belongs to another family.
    ``embeds``: the model does not generate, so texts are decoded only for display, and any tokenizer is
    accepted."""
    parts = _flat(spec)
    kinds = [part.get("type") for part in parts]
    if embeds and kinds != ["ByteLevel"]:
        return TokenDecoder(byte_level=False, stripped_spaces=1, word_pieces=kinds == ["WordPiece"])
    if kinds == ["ByteLevel"]:
        return TokenDecoder(byte_level=True, stripped_spaces=0)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        is_space = parts[0].get("pattern") == {"String": "▁"} and parts[0].get("content") == " "
        strip: Mapping[str, Any] = parts[3] if len(parts) == 4 else {"content": " ", "start": 0, "stop": 0}
        if is_space and strip.get("content") == " " and strip.get("stop") == 0:
            return TokenDecoder(byte_level=False, stripped_spaces=int(strip.get("start", 0)))
    raise BadModelFolder(
        f"{where} decodes with {' + '.join(map(str, kinds)) or 'nothing'}; supported are byte-level BPE "
        "(ByteLevel) and SentencePiece-style BPE with byte fallback (Replace + ByteFallback + Fuse + Strip)",
        param="decoder",
    )


def _flat(spec: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if spec is None:
        return []
    if spec.get("type") != "Sequence":
        return [spec]
    return [part for child in spec.get("decoders", []) for part in _flat(child)]


SpacePrefix = Literal["none", "first", "every"]
"""``first``: only at the beginning of the whole text. ``every``: also after each added token in the text."""

_CHILDREN = ("normalizers", "pretokenizers")


def find_space_prefix(*parts: Mapping[str, Any] | None) -> SpacePrefix:
    """Returns where this normalizer and pre-tokenizer of a ``tokenizer.json`` add a space."""
    found: set[SpacePrefix] = {"none"}
    for part in parts:
        if part is not None:
            found.add(_own_prefix(part))
            children = [child for name in _CHILDREN for child in part.get(name, [])]
            found.add(find_space_prefix(*children))
    return "every" if "every" in found else "first" if "first" in found else "none"


def without_space_prefix(part: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the normalizer or pre-tokenizer without the part that adds a space in front."""
    if part is None or part.get("type") == "Prepend":
        return None
    bare = dict(part)
    if part.get("type") == "Metaspace":
        bare["prepend_scheme"] = "never"
        bare.pop("add_prefix_space", None)  # the older name
    elif part.get("type") == "ByteLevel":
        bare["add_prefix_space"] = False
    for name in _CHILDREN:
        if name in part:
            children = [without_space_prefix(child) for child in part[name]]
            bare[name] = [child for child in children if child is not None]
    return bare


def _own_prefix(part: Mapping[str, Any]) -> SpacePrefix:
    kind = part.get("type")
    if kind == "Prepend":
        return "every"
    if kind == "Metaspace":
        scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
        return "first" if scheme == "first" else "every" if scheme == "always" else "none"
    if kind == "ByteLevel" and part.get("add_prefix_space", True):
        return "every"
    return "none"


# Shorter texts take less than 0.2 ms and are encoded under the GIL.
_LONG_CHARS = 1000
# The most characters that Unicode composes to one (U+1F82 decomposes to four).
COMPOSED_CHARS = 4


class Tokenizer:
    """The tokenizer of one model. Its methods may be called from any thread and release the GIL while they
    encode long texts, so callers may run them in worker threads.

    ``vocab_size``: ids are below it. ``special_ids``: tokens without text. ``named_tokens``: by role, such as
    ``{"bos_token": "<s>"}``. ``prefix_ids``: the ids that precede a text without a template (usually none or
    bos). ``space_prefix``: where encoding adds a space. ``mark_ids``: tokens that a model may write and
    contents may not, such as marks of calls or reasoning; they have text even if special. ``identity``: a
    digest, equal for tokenizers made from the same files.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        *,
        named_tokens: Mapping[str, str] | None = None,
        turn_markup: str = "",
        tool_markup: str = "",
        template_source: str = "",
        embeds: bool = False,
        where: str = "the tokenizer",
    ) -> None:
        """Builds a tokenizer. An added token is *closed* to contents if it is plain text in them.

        Args:
            spec: the object in ``tokenizer.json``.
            named_tokens: special tokens by role.
            turn_markup: the template's markup of turns; an added token in it is closed to contents even if it
                is not special.
            tool_markup: the markup of tool calls; an added token in it is closed to contents and is text in a
                model's output, so that calls can be parsed.
            template_source: the chat template; an added token in it that is not special is closed to contents
                and open to models, and so are marks of reasoning, special or not.
            embeds: whether it belongs to an embedding model.
            where: the name of the tokenizer in messages.

        Raises:
            BadModelFolder: the tokenizer is invalid, or of an unsupported family.
        """
        self.named_tokens = dict(named_tokens or {})
        parts = (spec, self.named_tokens, turn_markup, tool_markup, template_source)
        self.identity = hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
        self._decoder: TokenDecoder = read_decoder(spec.get("decoder"), where, embeds=embeds)
        self._added: list[dict[str, Any]] = spec.get("added_tokens") or []
        named = set(self.named_tokens.values())
        is_special = {t["content"]: bool(t["special"]) or t["content"] in named for t in self._added}
        reasoning = is_special.keys() & set(reasoning_marks(template_source) or ())
        if has_channels(template_source):
            reasoning |= is_special.keys() & CHANNEL_TOKENS - named
        turns = {text for text in is_special if text.strip() and text in turn_markup} - reasoning
        marks = {text for text in is_special if text.strip() and text in tool_markup} - turns - named
        named_in_template = {text for text in is_special if text.strip() and text in template_source} - turns
        marks |= {text for text in named_in_template if not is_special[text]} | reasoning
        self._closed_to_content = turns | marks | {text for text, special in is_special.items() if special}

        bare: dict[str, Any] = {"truncation": None, "padding": None, "post_processor": None}
        self._markup = _load({**spec, "truncation": None, "padding": None}, where)
        _check_normal_forms(self._markup, self._added, where)
        self._content = _variant({**spec, **bare}, self._markup, self._added, self._closed_to_content)
        self._whole = self._content
        if embeds:
            self._whole = _variant({**spec, **bare}, self._markup, self._added, self._closed_to_content)
            if self._markup.post_processor is not None:
                self._whole.post_processor = self._markup.post_processor
        self.space_prefix: SpacePrefix = find_space_prefix(spec.get("normalizer"), spec.get("pre_tokenizer"))
        strips = any(token.get("lstrip") or token.get("rstrip") for token in self._added)
        self._most_shrinkage = (
            None
            if strips or _removes_text(spec.get("pre_tokenizer"))
            else _most_shrinkage(without_space_prefix(spec.get("normalizer")))
        )
        self._inner_markup, self._inner_content = self._markup, self._content
        if self.space_prefix != "none":
            for name in ("normalizer", "pre_tokenizer"):
                bare[name] = without_space_prefix(spec.get(name))
            self._inner_markup = _variant({**spec, **bare}, self._markup, self._added, None)
            self._inner_content = _variant(
                {**spec, **bare}, self._markup, self._added, self._closed_to_content
            )
        self._inner_written = self._inner_content
        if marks:
            open_to_models = self._closed_to_content - marks
            self._inner_written = _variant({**spec, **bare}, self._markup, self._added, open_to_models)

        # Asks the library, because it numbers added tokens itself and ignores the ids in the file.
        ids = {text: i for text in is_special if (i := self._markup.token_to_id(text)) is not None}
        self._added_ids = frozenset(ids.values())
        self._closed_ids = frozenset(ids[text] for text in self._closed_to_content)
        self.special_ids = frozenset(ids[text] for text, special in is_special.items() if special)
        self.mark_ids = frozenset(ids[text] for text in marks)
        model_size: int = self._markup.get_vocab_size(with_added_tokens=False)
        self.vocab_size = max([model_size, *(i + 1 for i in self._added_ids)])
        probe = self._markup.encode("a", add_special_tokens=True)
        first_text = probe.special_tokens_mask.index(0) if 0 in probe.special_tokens_mask else 0
        self.prefix_ids: tuple[int, ...] = tuple(probe.ids[:first_text])

    @classmethod
    @reading_once()
    def from_folder(
        cls, folder: Path, *, template: ChatTemplate | None = None, embeds: bool = False
    ) -> Tokenizer:
        """Reads ``tokenizer.json`` and its related files, or a GGUF file. ``template``: the model's template,
        if it does not come from the folder. ``embeds``: whether it belongs to an embedding model. Raises
        ``BadModelFolder``."""
        spec, where = read_tokenizer(folder), f"the tokenizer in {folder}"
        template = ChatTemplate.from_folder(folder) if template is None else template
        calls = tool_format(template)
        try:
            all_special = all(token["special"] for token in spec.get("added_tokens") or [])
            return cls(
                spec,
                named_tokens=named_special_tokens(folder),
                turn_markup="" if all_special else template.turn_markup(),
                tool_markup=calls.begin + calls.end,
                template_source=template.source,
                embeds=embeds,
                where=where,
            )
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadModelFolder(
                f"{where} is damaged ({type(error).__name__}: {error}): fetch it again",
                param="tokenizer.json",
            ) from error

    @property
    def bos(self) -> str | None:
        """The token that begins a sequence, in written form."""
        return self.named_tokens.get("bos_token")

    @property
    def eos(self) -> str | None:
        """The token that ends a sequence, in written form."""
        return self.named_tokens.get("eos_token")

    @property
    def bos_id(self) -> int | None:
        return None if self.bos is None else self.find_id(self.bos)

    @property
    def eos_id(self) -> int | None:
        return None if self.eos is None else self.find_id(self.eos)

    @property
    def closed_ids(self) -> frozenset[int]:
        """Tokens that no content contains: special tokens, and tokens with a meaning in the chat template or
        in tool calls."""
        return self._closed_ids

    def find_id(self, token: str) -> int | None:
        """Returns the id of a token in written form; None if it is not in the vocabulary."""
        found: int | None = self._markup.token_to_id(token)
        return found

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        """Returns the ids of content. They never contain a special token.

        ``continues``: the text follows other text (see ``continues_after``), so no space is added in front.
        Raises ``BadArgument`` for a text with a lone surrogate.
        """
        ids = self._encode(self._content, self._inner_content, text, continues)
        if self._closed_ids.isdisjoint(ids):
            return ids
        # The vocabulary's merges can build a special token from plain text: spell it instead.
        return [part for i in ids for part in (self._spell(i) if i in self._closed_ids else (i,))]

    def encode_whole(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of separate texts, with the special tokens that the model expects around each. Only
        for embedding models. Raises ``BadArgument`` for a text with a lone surrogate."""
        try:
            with _ReportingPanics():
                encoded = self._whole.encode_batch(list(texts), add_special_tokens=True)
        except TypeError as error:
            raise BadArgument("cannot encode a lone surrogate") from error
        return [list(one.ids) for one in encoded]

    def encode_written(self, text: str) -> list[int]:
        """Returns the ids of text that a model writes after other text: like content, but marks of tool calls
        are recognised."""
        if not self.mark_ids:
            return self.encode(text, continues=True)
        ids = self._encode(self._inner_written, self._inner_written, text, True)
        shut = self._closed_ids - self.mark_ids
        return (
            ids if shut.isdisjoint(ids) else [p for i in ids for p in (self._spell(i) if i in shut else (i,))]
        )

    def encode_markup(self, text: str, *, continues: bool = False) -> list[int]:
        """Returns the ids of trusted template text, in which special tokens are recognised."""
        return self._encode(self._markup, self._inner_markup, text, continues)

    def closed_spans(self, text: str) -> list[tuple[int, int]]:
        """Returns the start and end of each token of ``closed_ids`` in ``text``, read as markup."""
        if not self._closed_ids:
            return []
        encoded = self._encoding(self._markup, text)
        pairs = zip(encoded.ids, encoded.offsets, strict=True)
        return [span for token, span in pairs if token in self._closed_ids]

    @cached_property
    def finds_spelled(self) -> bool:
        """Whether ``spelled`` finds exactly the tokens of ``closed_ids`` that markup would have. A normalizer
        may let other text become such a token."""
        closed = [token for token in self._added if token["content"] in self._closed_to_content]
        is_normalised = self._markup.normalizer is not None
        return not any(
            token.get("single_word") or (is_normalised and token.get("normalized")) for token in closed
        )

    @cached_property
    def cuts_at_closed(self) -> bool:
        """Whether the text before and after each token of ``closed_ids`` in markup is encoded independently
        of it."""
        closed = [token for token in self._added if token["content"] in self._closed_to_content]
        return not any(token.get("lstrip") or token.get("rstrip") for token in closed)

    def spelled(self, text: str) -> list[tuple[int, int]]:
        """Returns the start and end of each token of ``closed_ids`` in ``text``, by search. Far faster than
        ``closed_spans``; see ``finds_spelled``."""
        if len(self._spellings) == 1:
            return [match.span() for match in self._spellings[0].finditer(text)]
        places = sorted(match.span() for one in self._spellings for match in one.finditer(text))
        found: list[tuple[int, int]] = []
        for low, high in places:
            if not found or low >= found[-1][1]:
                found.append((low, high))
        return found

    @cached_property
    def longest_spelled(self) -> int:
        """The length of the longest token in ``closed_ids``, in characters."""
        return max(map(len, self._closed_to_content), default=0)

    @cached_property
    def _spellings(self) -> list[re.Pattern[str]]:
        """A pattern for each first character of the closed tokens, for which ``re`` searches quickly. The
        longest token at a place applies."""
        firsts: dict[str, list[str]] = {}
        for written in sorted(filter(None, self._closed_to_content), key=len, reverse=True):
            firsts.setdefault(written[0], []).append(re.escape(written[1:]))
        return [re.compile(f"{re.escape(first)}(?:{'|'.join(rest)})") for first, rest in firsts.items()]

    def encode_exact(self, text: str, *, continues: bool = False) -> list[int]:
        """Returns ids of content with exactly the bytes of ``text``, even where the tokenizer would normalise
        it. Characters that it cannot write otherwise are written byte by byte. (A byte without a token is
        dropped, as in ``encode``: SmolLM2 has no token for U+0004.)"""
        ids = self.encode(text, continues=continues)
        if self.decode(ids, continues=continues) == text:
            return ids
        ids = []
        for char in text if continues else " " * self.max_leading_spaces + text:
            one = self.encode(char, continues=True)
            exact = self.decode(one, continues=True) == char
            ids.extend(one if exact else self._byte_ids(char.encode()))
        return ids

    def continues_after(self, num_chars: int, last_id: int | None) -> bool:
        """Whether text after ``num_chars`` characters, the last of which are token ``last_id``, continues
        them. False if this tokenizer adds a space in front of the text."""
        if num_chars == 0:
            return False
        return not (self.space_prefix == "every" and last_id in self._added_ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """Returns the text of ``ids``. Invalid UTF-8 becomes U+FFFD as in ``bytes.decode``. ``continues``:
        the ids follow other text, so a space in front is kept."""
        table = self.byte_table if skip_special else self._bytes_with_special
        size = len(table)
        text = b"".join([table[i] for i in ids if 0 <= i < size]).decode(errors="replace")
        return text if continues else text[self.leading_spaces(text) :]

    def list_texts(self, ids: Iterable[int]) -> list[str]:
        """Returns the text of each token, including special ones. A character that several tokens form
        belongs to the last of them. Joined, the texts are ``decode(ids, skip_special=False,
        continues=True)``."""
        table = self._bytes_with_special
        size = len(table)
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        texts = [utf8.decode(table[i] if 0 <= i < size else b"") for i in ids]
        if texts:
            texts[-1] += utf8.decode(b"", final=True)
        return texts

    def num_spelling(self, ids: Sequence[int], start: int, num_bytes: int) -> int:
        """Returns how many of ``ids``, from ``start`` on, have together at least ``num_bytes`` bytes of text,
        special tokens included; all of them if they have fewer."""
        table = self._bytes_with_special
        end, size = start, len(table)
        while num_bytes > 0 and end < len(ids):
            num_bytes -= len(table[ids[end]]) if 0 <= ids[end] < size else 0
            end += 1
        return end - start

    def leading_spaces(self, text: str) -> int:
        """Returns the number of spaces that decoding removes from the front of a text at the start of a
        sequence."""
        most = self._decoder.stripped_spaces
        return min(most, len(text) - len(text.lstrip(" "))) if most else 0

    @property
    def max_leading_spaces(self) -> int:
        """Returns the largest possible result of ``leading_spaces``."""
        return self._decoder.stripped_spaces

    def fewest_tokens(self, num_chars: int) -> int:
        """Returns a lower bound of the tokens of a content or markup of this length, without encoding it
        (except for characters that the vocabulary cannot write). 0 if the tokenizer may remove any number of
        characters."""
        shrinkage = self._most_shrinkage
        return 0 if shrinkage is None else -(-num_chars // (shrinkage * self._longest))

    def prepare(self) -> None:
        """Computes the table for ``fewest_tokens``, so that its first call need not. Takes 0.1 s for 50,000
        tokens: call it from a thread."""
        _ = self._longest

    @cached_property
    def _longest(self) -> int:
        """The largest number of bytes, and so of characters, of one token."""
        return max(1, *map(len, self._bytes_with_special))

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token; empty for special tokens and unknown ids."""
        return self.byte_table[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Returns a token's text after other text, and its bytes. Cached, because the same tokens recur in
        log-probabilities."""
        found = self._shown.get(token_id)
        if found is None:
            text = self.decode([token_id], skip_special=False, continues=True)
            found = text, self.token_bytes(token_id)
            if 0 <= token_id < self.vocab_size:
                self._shown[token_id] = found
        return found

    @cached_property
    def _shown(self) -> dict[int, tuple[str, bytes]]:
        return {}

    @cached_property
    def byte_table(self) -> list[bytes]:
        """The bytes of each id. Computed at first use; concurrent threads may both compute it."""
        written = [self._markup.id_to_token(i) for i in range(self.vocab_size)]
        to_bytes, unseen = self._decoder.to_bytes, self.special_ids - self.mark_ids
        table = [b"" if token is None or i in unseen else to_bytes(token) for i, token in enumerate(written)]
        if self._decoder.byte_level:
            # Tokens that were added to the model's vocabulary are written literally. The library reads
            # "größe" in GPT-2's alphabet, which has each of its letters.
            first = self._markup.get_vocab_size(with_added_tokens=False)
            for i in self._added_ids - unseen:
                if i >= first:
                    table[i] = (written[i] or "").encode()
        return table

    @cached_property
    def _bytes_with_special(self) -> list[bytes]:
        table = list(self.byte_table)
        for i in self.special_ids:
            table[i] = (self._markup.id_to_token(i) or "").encode()
        return table

    def _encode(
        self, whole: tokenizers.Tokenizer, inner: tokenizers.Tokenizer, text: str, continues: bool
    ) -> list[int]:
        encoded = self._encoding(whole, text)
        ids: list[int] = encoded.ids
        if not continues or inner is whole:
            return ids
        # Text after an added token is a separate section, encoded by the rules of a whole text.
        first = next((n for n, i in enumerate(ids) if i in self._added_ids), None)
        if first is None:
            return list(_encoded(inner, text).ids)
        head = text[: encoded.offsets[first][0]]
        return [*_encoded(inner, head).ids, *ids[first:]]

    def _encoding(self, whole: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
        try:
            return _encoded(whole, text)
        except TypeError as error:
            raise BadArgument(f"cannot encode a lone surrogate: {text[:40]!r}") from error

    def _spell(self, token_id: int) -> list[int]:
        ids: list[int] = []
        for char in self._markup.id_to_token(token_id) or "":
            one: list[int] = _encoded(self._inner_content, char).ids
            ids.extend(one if self._closed_ids.isdisjoint(one) else self._byte_ids(char.encode()))
        return ids

    def _byte_ids(self, data: bytes) -> list[int]:
        return [self._id_of_byte[byte] for byte in data if byte in self._id_of_byte]

    @cached_property
    def _id_of_byte(self) -> dict[int, int]:
        return {data[0]: i for i, data in enumerate(self.byte_table) if len(data) == 1}


def _most_shrinkage(normalizer: Mapping[str, Any] | None) -> int | None:
    """Returns the largest number of characters that the normalizer merges into one; None: unknown."""
    if normalizer is None:
        return 1
    return COMPOSED_CHARS if normalizer.get("type") in ("NFC", "NFKC") else None


def _removes_text(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether the pre-tokenizer may remove any number of characters from a text."""
    if pre_tokenizer is None:
        return False
    kinds = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit")
    is_removing = pre_tokenizer.get("type") in kinds or pre_tokenizer.get("behavior") == "Removed"
    return is_removing or any(map(_removes_text, pre_tokenizer.get("pretokenizers", [])))


def _check_normal_forms(
    tokenizer: tokenizers.Tokenizer, added: Collection[Mapping[str, Any]], where: str
) -> None:
    """Rejects added tokens that the normalizer empties: the library would search for them without end."""
    if tokenizer.normalizer is None:
        return
    for token in added:
        if token.get("normalized") and not tokenizer.normalizer.normalize_str(token["content"]):
            raise BadModelFolder(
                f"{where} cannot be used: its normalizer leaves nothing of the added token "
                f"{token['content']!r}; set its `normalized` to false",
                param="tokenizer.json",
            )


def _encoded(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    with _ReportingPanics():
        if len(text) < _LONG_CHARS:
            return tokenizer.encode(text, add_special_tokens=False)
        # Only the library's batch method releases the GIL.
        return tokenizer.encode_batch([text], add_special_tokens=False)[0]


class _ReportingPanics:
    """Turns a panic of the library into ``BadArgument``. It is no ``Exception``, so it would pass the
    handlers of one request and end the task of all. (``contextlib``'s managers cost 2 µs for each text.)"""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None and kind.__name__ == "PanicException":
            raise BadArgument(f"the model's tokenizer cannot encode this text: {error}") from error


def _load(spec: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(msgspec.json.encode(spec).decode())
    except BaseException as error:
        # The library raises bare Exception, and BaseException if it panics.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BadModelFolder(f"{where} cannot be used: {error}", param="tokenizer.json") from error


def _variant(
    spec: Mapping[str, Any],
    base: tokenizers.Tokenizer,
    added: Collection[Mapping[str, Any]],
    closed_to_content: Collection[str] | None,
) -> tokenizers.Tokenizer:
    """Returns a tokenizer that shares ``base``'s vocabulary in memory and differs in the rest of ``spec``.

    ``closed_to_content``: added tokens that are not recognised in text; None: all are recognised. Recognition
    is a flag of the library's object, so each variant is a separate object.
    """
    is_open = closed_to_content is None
    tokens = [
        dict(token, special=not is_open and token["content"] in (closed_to_content or ())) for token in added
    ]
    empty = {**spec, "model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    variant = tokenizers.Tokenizer.from_str(msgspec.json.encode(empty).decode())
    variant.model = base.model
    variant.add_tokens([tokenizers.AddedToken(**{k: v for k, v in t.items() if k != "id"}) for t in tokens])
    variant.encode_special_tokens = not is_open
    return variant
