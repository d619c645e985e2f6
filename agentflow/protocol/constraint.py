"""Constraints on the text of a generation.

A backend lists the supported kinds in its ``Capabilities``; others are rejected before anything runs.
The client parses the text into a value (``language.typed``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal, get_args

import msgspec

from agentflow.errors import BadArgument, short_repr
from agentflow.protocol.unreadable import UNREADABLE

ConstraintKind = Literal["regex", "schema", "choices", "grammar", "tags"]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = get_args(ConstraintKind)
TaggedKind = Literal["regex", "schema", "grammar"]
Whitespace = Literal["compact", "tight", "free"]

INTEGER_PATTERN: Final = r"-?(0|[1-9][0-9]{0,17})"
"""The pattern of a ``gen(type=int)``."""
NUMBER_PATTERN: Final = INTEGER_PATTERN + r"(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?"
"""The pattern of a ``gen(type=float)``."""
_NUMBERS: Final = {INTEGER_PATTERN: '{"type": "integer"}', NUMBER_PATTERN: '{"type": "number"}'}
"""The JSON schemas of the patterns of numbers."""

MAX_SOURCE_CHARS = 200_000
MAX_CONSTRAINT_CHOICES = 1000
MAX_TAGS = 100
MAX_MARK_CHARS = 200


class TagRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """One member of the list in the source of a ``tags`` constraint: the text between ``begin`` and the first
    ``end`` after a whole text satisfies a constraint of this ``kind`` and ``source``. ``lead``, such as a
    line break, must follow ``begin``. The ``end`` of a schema may be empty, because a JSON object or list
    ends by itself."""

    begin: str
    kind: TaggedKind
    source: str
    end: str
    lead: str = ""

    def check(self) -> None:
        """Raises ``BadArgument`` for values that a tag cannot have."""
        least_end = 0 if self.kind == "schema" else 1
        for name, mark, least in (
            ("begin", self.begin, 1),
            ("end", self.end, least_end),
            ("lead", self.lead, 0),
        ):
            if not isinstance(mark, str) or not least <= len(mark) <= MAX_MARK_CHARS:
                raise BadArgument(
                    f"tags: {name} must be a string of {least} to {MAX_MARK_CHARS} characters",
                    param=name,
                )
        _check_source(self.kind, self.source)


def _check_source(kind: ConstraintKind, source: str) -> None:
    if not isinstance(source, str):
        raise BadArgument(f"{kind}: give it as a string, not {short_repr(source)}")
    if not 0 < len(source) <= MAX_SOURCE_CHARS:
        raise BadArgument(f"{kind}: the source must have 1 to {MAX_SOURCE_CHARS} characters")


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A constraint on the whole text. The fields after ``jump_forward`` belong to one kind: the first four to
    ``tags``, the last two to ``schema``."""

    kind: ConstraintKind
    # The regular expression that the whole text matches, the JSON schema (as JSON), the grammar (in Lark's
    # notation), or the tags that may stand in free text (a JSON list of ``TagRule``).
    source: str = ""
    choices: tuple[str, ...] = ()  # the text is one of these
    # The white space between the parts of a JSON value: ``compact`` is one line with ``, `` and ``: ``,
    # ``tight`` none, ``free`` any.
    whitespace: Whitespace = "compact"
    jump_forward: bool = True  # forced text may be appended without sampling
    between: str | None = None  # no free text: at least one tag, and exactly this text between two tags
    max_tags: int | None = None  # None: any number; after the last allowed tag, the text ends
    # An alternative constraint, not of the kind ``tags`` and without its own alternative.
    instead: Constraint | None = None
    apart: tuple[str, ...] = ()  # a text under ``instead`` begins with none of these
    # After this many characters, a string ends as soon as the schema allows it, and so does a list or object
    # after this many members (None: unlimited), so that a model cannot continue it forever.
    string_chars: int | None = None
    list_items: int | None = None

    @property
    def has_free_text(self) -> bool:
        """Whether text may stand before the first tag."""
        return self.kind == "tags" and self.between is None and self.instead is None

    def as_one_of(self, kinds: Collection[ConstraintKind]) -> Constraint | None:
        """The constraint as one of these kinds; None if that is not possible. The patterns of numbers can be
        converted to JSON schemas.

        >>> Constraint("regex", INTEGER_PATTERN).as_one_of(["schema"]).source
        '{"type": "integer"}'
        """
        if self.kind in kinds:
            return self
        if self.kind != "regex" or "schema" not in kinds or self.source not in _NUMBERS:
            return None
        return msgspec.structs.replace(self, kind="schema", source=_NUMBERS[self.source])

    def check(self) -> Constraint:
        """Returns itself, or raises ``BadArgument`` for values that a constraint cannot have."""
        if self.kind == "choices":
            self._check_choices()
        else:
            _check_source(self.kind, self.source)
        if self.kind == "tags":
            _check_tags(self.tags())
        self._check_sequence()
        self.check_instead()
        if self.instead is not None:
            self.instead.check()
        for name, most in (("string_chars", self.string_chars), ("list_items", self.list_items)):
            if most is not None and (self.kind != "schema" or not isinstance(most, int) or most < 1):
                raise BadArgument(f"{name} must be 1 or more, and is for JSON schemas")
        self.check_decoding()
        return self

    def check_decoding(self) -> None:
        """The part of ``check`` for ``whitespace`` and ``jump_forward``."""
        if self.whitespace not in get_args(Whitespace):
            known = ", ".join(map(repr, get_args(Whitespace)))
            raise BadArgument(
                f"whitespace must be one of {known}, not {self.whitespace!r}", param="whitespace"
            )
        if self.whitespace != "compact" and not self.has_schema:
            raise BadArgument(
                f"whitespace={self.whitespace!r} is for JSON schemas, not for {self.kind}", param="whitespace"
            )
        if not isinstance(self.jump_forward, bool):
            raise BadArgument(
                f"jump_forward must be True or False, not {self.jump_forward!r}", param="jump_forward"
            )

    @property
    def has_schema(self) -> bool:
        """Whether the constraint contains a JSON schema."""
        return self.kind == "schema" or (
            self.kind == "tags" and any(tag.kind == "schema" for tag in self.tags())
        )

    def texts(self) -> list[str]:
        """All texts in the constraint, to estimate its memory."""
        found: list[str] = []
        part: Constraint | None = self
        while part is not None:  # a client may send a long chain, which is rejected later
            found += [part.source, part.between or "", *part.choices, *part.apart]
            part = part.instead
        return found

    def tags(self) -> tuple[TagRule, ...]:
        """The tags of a ``tags`` constraint. ``BadArgument`` if the source is not a list of tags."""
        try:
            return msgspec.json.decode(self.source, type=tuple[TagRule, ...])
        except UNREADABLE as error:
            raise BadArgument(f"tags: the source is not a list of tags: {error}") from None

    def _check_sequence(self) -> None:
        if self.between is None and self.max_tags is None:
            return
        if self.kind != "tags":
            raise BadArgument(f"between and max_tags are for tags, not for {self.kind}", param="between")
        between = "" if self.between is None else self.between
        if not isinstance(between, str) or len(between) > MAX_MARK_CHARS:
            raise BadArgument(
                f"between must be a string of at most {MAX_MARK_CHARS} characters, or None", param="between"
            )
        if self.max_tags is not None and not (
            isinstance(self.max_tags, int) and 0 < self.max_tags <= MAX_TAGS
        ):
            raise BadArgument(f"max_tags must be 1 to {MAX_TAGS}, or None", param="max_tags")

    def check_instead(self) -> None:
        """The part of ``check`` for ``instead`` and ``apart``, without the fields of the alternative."""
        if not all(isinstance(text, str) and 0 < len(text) <= MAX_MARK_CHARS for text in self.apart):
            raise BadArgument(
                f"apart: each must be a string of 1 to {MAX_MARK_CHARS} characters", param="apart"
            )
        if len(self.apart) > MAX_TAGS or (self.apart and self.instead is None):
            raise BadArgument(f"apart: at most {MAX_TAGS}, and only with instead", param="apart")
        if self.instead is None:
            return
        if self.kind == "tags" and self.between is None:
            raise BadArgument("instead: tags in free text need no alternative", param="instead")
        if self.instead.kind == "tags" or self.instead.instead is not None:
            raise BadArgument("instead: a single constraint of another kind than tags", param="instead")

    def _check_choices(self) -> None:
        if not all(isinstance(choice, str) and choice for choice in self.choices):
            raise BadArgument("choices: each must be a string that is not empty")
        if not 0 < len(set(self.choices)) == len(self.choices) <= MAX_CONSTRAINT_CHOICES:
            raise BadArgument(f"choices: 1 to {MAX_CONSTRAINT_CHOICES} different ones are needed")


def _check_tags(tags: tuple[TagRule, ...]) -> None:
    if not 0 < len(tags) <= MAX_TAGS:
        raise BadArgument(f"tags: 1 to {MAX_TAGS} are needed")
    for tag in tags:
        tag.check()
    begins = [tag.begin for tag in tags]
    for index, begin in enumerate(begins):
        # Otherwise one text could begin two tags.
        inside = next((other for other in begins[:index] + begins[index + 1 :] if begin in other), None)
        if inside is not None:
            raise BadArgument(
                f"tags: {begin!r} begins a tag, and is part of {inside!r}, which begins another"
            )
