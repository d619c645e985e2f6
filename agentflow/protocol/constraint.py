"""Constraints: what shape the text of a generation must have.

A backend says in its capabilities which kinds it can keep; the others are refused before anything runs.
How a value is made of the text again is the client's business (``value_type``).
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from agentflow.errors import BadArgument

ConstraintKind = Literal["regex", "schema", "choices", "grammar", "tags"]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = get_args(ConstraintKind)
TaggedKind = Literal["regex", "schema", "grammar"]
Whitespace = Literal["compact", "tight", "free"]

MAX_SOURCE_CHARS = 200_000
MAX_CONSTRAINT_CHOICES = 1000
MAX_TAGS = 100
MAX_MARK_CHARS = 200


class TagRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """One member of the list that a constraint of the kind ``tags`` has for its source: what stands
    between ``begin`` and the next ``end`` after it is a text of this ``kind`` and ``source``. ``lead``, such
    as a line break, must come right after ``begin``. The end of a schema may be empty: a JSON object or
    list ends by itself."""

    begin: str
    kind: TaggedKind
    source: str
    end: str
    lead: str = ""

    def check(self) -> None:
        """``BadArgument`` where it cannot be one."""
        least_end = 0 if self.kind == "schema" else 1
        for name, mark, least in (
            ("begin", self.begin, 1),
            ("end", self.end, least_end),
            ("lead", self.lead, 0),
        ):
            if not isinstance(mark, str) or not least <= len(mark) <= MAX_MARK_CHARS:
                raise BadArgument(f"tags: {name} must be a string of {least} to {MAX_MARK_CHARS} characters")
        Constraint(self.kind, self.source).check()


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """``source``: the regular expression that all of the text matches, the JSON schema (as JSON), the
    grammar (Lark's notation), or the tags that may stand in free text (a JSON list, see ``tags``).
    ``choices``: of these one, whole. ``whitespace`` between the parts of a JSON value: ``compact`` is one
    line with ``, `` and ``: ``, ``tight`` none, ``free`` any. ``jump_forward``: text that is forced may be
    appended without sampling. There are at most ``max_tags`` (None: any number). ``between``: with
    it, the tags stand in no free text: there is at least one, and between two there is just this.
    ``instead``: the text may just as well be one of this constraint, which is of another kind than ``tags``,
    and has none itself; such a text begins with none of ``apart``, so that one knows which it is."""

    kind: ConstraintKind
    source: str = ""
    choices: tuple[str, ...] = ()
    whitespace: Whitespace = "compact"
    jump_forward: bool = True
    between: str | None = None
    max_tags: int | None = None
    instead: Constraint | None = None
    apart: tuple[str, ...] = ()

    def check(self) -> Constraint:
        """Itself, or ``BadArgument`` where it cannot be one."""
        if self.kind == "choices":
            self._check_choices()
        elif not isinstance(self.source, str) or not 0 < len(self.source) <= MAX_SOURCE_CHARS:
            raise BadArgument(f"{self.kind}: a string of 1 to {MAX_SOURCE_CHARS} characters is needed")
        if self.kind == "tags":
            _check_tags(self.tags())
        self._check_row()
        self._check_instead()
        if self.whitespace not in get_args(Whitespace):
            known = ", ".join(map(repr, get_args(Whitespace)))
            raise BadArgument(f"whitespace must be one of {known}, not {self.whitespace!r}")
        if self.whitespace != "compact" and not self.has_schema:
            raise BadArgument(f"whitespace={self.whitespace!r} is for JSON schemas, not for {self.kind}")
        if not isinstance(self.jump_forward, bool):
            raise BadArgument(f"jump_forward must be True or False, not {self.jump_forward!r}")
        return self

    @property
    def has_schema(self) -> bool:
        """Whether a JSON schema is part of it."""
        return self.kind == "schema" or (
            self.kind == "tags" and any(tag.kind == "schema" for tag in self.tags())
        )

    def texts(self) -> list[str]:
        """All that is written in it, for whoever counts what it holds."""
        found: list[str] = []
        part: Constraint | None = self
        while part is not None:  # a client may send a long chain, which is refused later
            found += [part.source, part.between or "", *part.choices, *part.apart]
            part = part.instead
        return found

    def tags(self) -> tuple[TagRule, ...]:
        """Of the kind ``tags``: its tags. ``BadArgument`` where the source is no list of tags."""
        try:
            return msgspec.json.decode(self.source, type=tuple[TagRule, ...])
        except (msgspec.DecodeError, UnicodeError) as error:
            raise BadArgument(f"tags: the source is no list of tags: {error}") from None

    def _check_row(self) -> None:
        if self.between is None and self.max_tags is None:
            return
        if self.kind != "tags":
            raise BadArgument(f"between and max_tags are for tags, not for {self.kind}")
        between = "" if self.between is None else self.between
        if not isinstance(between, str) or len(between) > MAX_MARK_CHARS:
            raise BadArgument(f"between must be a string of at most {MAX_MARK_CHARS} characters, or None")
        if self.max_tags is not None and not (
            isinstance(self.max_tags, int) and 0 < self.max_tags <= MAX_TAGS
        ):
            raise BadArgument(f"max_tags must be 1 to {MAX_TAGS}, or None")

    def _check_instead(self) -> None:
        if not all(isinstance(text, str) and 0 < len(text) <= MAX_MARK_CHARS for text in self.apart):
            raise BadArgument(f"apart: each must be a string of 1 to {MAX_MARK_CHARS} characters")
        if len(self.apart) > MAX_TAGS or (self.apart and self.instead is None):
            raise BadArgument(f"apart: at most {MAX_TAGS}, and only with instead")
        if self.instead is None:
            return
        if self.kind == "tags" and self.between is None:
            raise BadArgument("instead: tags in free text leave nothing else to be said")
        if self.instead.kind == "tags" or self.instead.instead is not None:
            raise BadArgument("instead: one constraint, and not of tags")
        self.instead.check()

    def _check_choices(self) -> None:
        if not all(isinstance(choice, str) and choice for choice in self.choices):
            raise BadArgument("choices: each must be a string, and not an empty one")
        if not 0 < len(set(self.choices)) == len(self.choices) <= MAX_CONSTRAINT_CHOICES:
            raise BadArgument(f"choices: 1 to {MAX_CONSTRAINT_CHOICES} of them, each once")


def _check_tags(tags: tuple[TagRule, ...]) -> None:
    if not 0 < len(tags) <= MAX_TAGS:
        raise BadArgument(f"tags: 1 to {MAX_TAGS} of them")
    for tag in tags:
        tag.check()
    begins = [tag.begin for tag in tags]
    for index, begin in enumerate(begins):
        # Otherwise a text could begin two tags at once.
        inside = next((other for other in begins[:index] + begins[index + 1 :] if begin in other), None)
        if inside is not None:
            raise BadArgument(
                f"tags: {begin!r} begins a tag, and is part of {inside!r}, which begins another"
            )
