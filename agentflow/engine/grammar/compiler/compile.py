"""Compiles a constraint: to a DFA if it is regular and small, else to a grammar for llguidance.

Pure and independent of any model. It runs in a process that may be killed. Constraints are rejected here,
before a token is generated, with the name of the unsupported part.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher
from msgspec.structs import replace

from agentflow.engine.grammar.compiler.ebnf import lark_of_gbnf, regex_of_gbnf
from agentflow.engine.grammar.compiler.endless_text import marked
from agentflow.engine.grammar.compiler.explicit_schema import (
    Schema,
    check_schema,
    drop_unused_definitions,
    explicit,
    for_llguidance,
    num_alternatives,
    parse_schema,
)
from agentflow.engine.grammar.compiler.lark import (
    TagBody,
    WithEnd,
    either_grammar,
    pattern_with_end,
    regex_with_end,
    row_grammar,
    row_regex,
    tag_alone,
    tag_grammar,
    text_apart,
    write_pattern,
)
from agentflow.engine.grammar.compiler.messages import CompiledConstraint, PartedConstraint, Relaxed
from agentflow.engine.grammar.compiler.relax import check_kept, compile_parts
from agentflow.engine.grammar.dfa import build_dfa
from agentflow.engine.grammar.json_schema import (
    FREE_WHITESPACE_CHARS,
    MOST_POSITIONS,
    num_positions,
    schema_to_regex,
)
from agentflow.engine.grammar.llguidance import (
    ALL_TOKENS_ALLOWED,
    LEXER_STATES,
    NOWHERE_TO_GO,
    LlguidanceGrammar,
    LlguidanceMatcher,
    LlguidanceVocabulary,
    parser_limits,
)
from agentflow.engine.grammar.regex import (
    ANY_CHAR,
    Alternation,
    Concatenation,
    LookAhead,
    Regex,
    Repeat,
    TooLargeForDfa,
    literal,
    parse_regex,
)
from agentflow.errors import BadArgument, RequestRefused, error_param
from agentflow.protocol.constraint import Constraint, TagRule, Whitespace
from agentflow.protocol.grammars.gbnf import rule_names

VERSION: Final = 1
"""The version of the compiled form, which is part of the key."""

_ONLY_EMPTY: Final = "no text but the empty one satisfies it"
_ANY_TEXT: Final = Repeat(ANY_CHAR, 0, None)
SMALL_STACK_BYTES: Final = 1 << 20

_TRIED_TEXTS: Final = 8
_TRIED_BYTES: Final = 200
"""The length of the texts that test a grammar. Longer ones take long with large character sets."""

_PLACES_WITHOUT_END: Final = 32
"""A tag that cannot end at more places in a row where its body may end is rejected. Shorter, a number or a
word may take the beginning of the end too, but has to stop."""

_START_OF_LARK: Final = re.compile(r"^([ \t]*)start(?=[ \t]*(?:\[[^\]\n]*\])?[ \t]*:)", re.MULTILINE)
_TERMINAL_OF_LARK: Final = re.compile(
    r"^[ \t]*(_?[A-Z][A-Z0-9_]*)(?=[ \t]*(?:\[[^\]\n]*\])?[ \t]*:)", re.MULTILINE
)
# temperature is not supported here; max_tokens would count tokens that jump-forward encodes again.
_ATTRIBUTE_OF_GEN: Final = re.compile(r"^[ \t]*\w+[ \t]*\[[^\]\n]*\b(temperature|max_tokens)\b", re.MULTILINE)
_WHITESPACE: Final[dict[str, dict[str, Any]]] = {
    "compact": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "tight": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    "free": {"whitespace_pattern": rf"[ \n\r\t]{{1,{FREE_WHITESPACE_CHARS}}}"},
}


def compile_constraint(constraint: Constraint) -> CompiledConstraint:
    """Returns the engine's form of a constraint that has passed ``check``. Raises ``BadArgument``, with the
    name of the part, for constraints that are not supported or match no text.

    >>> compile_constraint(Constraint("choices", choices=("yes", "no"))).form
    'dfa'
    """
    if not isinstance(constraint, PartedConstraint):
        return _compiled(constraint)
    key = _key(constraint)
    relaxed: list[Relaxed] = []
    if constraint.instead is not None and constraint.instead.parts:
        with error_param("instead"):
            other, found = _compiled_parts(constraint.instead)
        constraint = replace(constraint, instead=other)
        relaxed += found.relaxed
    if constraint.parts:
        _, found = _compiled_parts(constraint)
        relaxed += found.relaxed
    else:
        found = _compiled(constraint)
    return replace(found, key=key, relaxed=tuple(relaxed))


def _compiled_parts(constraint: PartedConstraint) -> tuple[PartedConstraint, CompiledConstraint]:
    alone = Constraint("schema", whitespace=constraint.whitespace)
    return compile_parts(
        constraint, _compiled, lambda schema: _compiled(replace(alone, source=json.dumps(schema)))
    )


def _compiled(constraint: Constraint) -> CompiledConstraint:
    compiled = _regex_or_grammar(constraint)
    if not isinstance(compiled, str):
        try:
            dfa = build_dfa(compiled)
        except TooLargeForDfa:
            compiled = _make_grammar(constraint, compiled)
        else:
            if constraint.kind == "grammar" and not dfa.transitions.any():
                raise BadArgument(f"grammar: {_ONLY_EMPTY}")
            return CompiledConstraint(_key(constraint), "dfa", dfa.to_bytes())
    count = _num_alternatives(constraint)
    payload = _checked(compiled, constraint.kind, count).encode()
    return CompiledConstraint(_key(constraint), "llguidance", payload, num_alternatives=count)


def _num_alternatives(constraint: Constraint) -> int:
    """Returns ``explicit_schema.num_alternatives`` of its schemas, for a parser."""
    sources = [constraint.source] if constraint.kind == "schema" else []
    if constraint.kind == "tags":
        sources = [tag.source for tag in constraint.tags() if tag.kind == "schema"]
    counts = [num_alternatives(_read_schema(source)) for source in sources]
    if constraint.instead is not None:
        counts.append(_num_alternatives(constraint.instead))
    return max(counts, default=0)


def _key(constraint: Constraint) -> str:
    """Returns a hash of everything that determines the result."""
    whitespace = constraint.whitespace if constraint.has_schema else ""
    said: list[object] = [VERSION, constraint.kind, constraint.source, constraint.choices, whitespace]
    if constraint.between is not None or constraint.max_tags is not None:
        said += [constraint.between, constraint.max_tags]
    if constraint.instead is not None:
        said += ["instead", _key(constraint.instead), constraint.apart]
    if isinstance(constraint, PartedConstraint) and constraint.parts:
        said += [[part.path, part.name, part.is_strict] for part in constraint.parts]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _regex_or_grammar(constraint: Constraint) -> Regex | str:
    first = _of_kind(constraint)
    if constraint.instead is None:
        return first
    with error_param("instead"):
        second = _of_kind(constraint.instead)
        if isinstance(first, str) or isinstance(second, str):
            return _either_grammar(constraint, first, constraint.instead, second)
        _check_alone(second)
    begins = Concatenation((Alternation(tuple([literal(text) for text in constraint.apart])), _ANY_TEXT))
    return Alternation((first, Concatenation((LookAhead(begins, wanted=False), second))))


def _check_alone(regex: Regex) -> None:
    """Raises ``BadArgument`` if no text matches: a union with another constraint would hide this."""
    with suppress(TooLargeForDfa):
        build_dfa(regex)


def _either_grammar(one: Constraint, first: Regex | str, other: Constraint, second: Regex | str) -> str:
    """Returns the union of two constraints, each with its compiled form.

    Raises ``BadArgument`` if a text of ``other`` may begin like a mark of ``one``: a parser cannot exclude
    such texts. Nor can it backtrack if words of two grammars begin alike, so bare JSON can only be combined
    with texts that begin differently, or with JSON.
    """
    if other.kind in ("regex", "choices"):
        pattern = _escaped(other.source) if isinstance(second, str) else write_pattern(second)
        grammar = text_apart(pattern, one.apart)
    else:
        grammar = _as_grammar(other, second)
    count = _num_alternatives(other)
    _checked(grammar, other.kind, count)
    is_alike = one.kind == "tags" or other.kind == "schema"
    for text in one.apart if is_alike else [text[:1] for text in one.apart]:
        if _accepts_prefix(grammar, text, count):
            raise BadArgument(
                f"{other.kind}: its text may begin with {text!r}, as a tool call does: make it stricter (an "
                "object with additionalProperties false, say), or allow no tool calls"
            )
    return either_grammar(_as_grammar(one, first), grammar)


def _accepts_prefix(grammar: str, text: str, count: int) -> bool:
    matcher = LlguidanceGrammar(grammar, _byte_vocabulary(), count).matcher()
    return _accepted(matcher, text.encode()) == len(text.encode())


def _of_kind(constraint: Constraint) -> Regex | str:
    if constraint.kind == "choices":
        return Alternation(tuple([literal(choice) for choice in constraint.choices]))
    if constraint.kind == "tags":
        tags = constraint.tags()
        return _of_tags(constraint, tags, [_tag_body(tag, constraint.whitespace) for tag in tags])
    return _of_source(constraint.kind, constraint.source, constraint.whitespace)


def _of_source(kind: str, source: str, whitespace: Whitespace) -> Regex | str:
    if kind == "regex":
        return _of_pattern(source)
    if kind == "schema":
        return _of_schema(source, whitespace)
    return _of_grammar(source)


def _of_tags(
    constraint: Constraint, tags: Sequence[TagRule], bodies: Sequence[TagBody], *, is_small: bool = True
) -> Regex | str:
    if constraint.between is None:
        return tag_grammar(tags, bodies, constraint.max_tags)
    plain = [body.regex if isinstance(body, WithEnd) else body for body in bodies]
    regular = [body for body in plain if body is not None and not isinstance(body, str)]
    if is_small and len(regular) == len(bodies):
        return row_regex(tags, regular, constraint.between, constraint.max_tags)
    return row_grammar(tags, bodies, constraint.between, constraint.max_tags)


def _of_pattern(pattern: str) -> Regex | str:
    try:
        return parse_regex(pattern)
    except TooLargeForDfa:
        return _lark_of_pattern(_escaped(pattern))


_UNESCAPED: Final = {"/": r"\/", "\n": r"\n", "\r": r"\r"}


def _escaped(pattern: str) -> str:
    """Returns a pattern that is put between slashes, where it has neither slashes nor line breaks."""
    return re.sub(r"\\?([/\n\r])|\\.", lambda found: _UNESCAPED.get(found[1], found[0]), pattern)


def _lark_of_pattern(pattern: str) -> str:
    return f"start: /{pattern}/\n{ALL_TOKENS_ALLOWED}"


@lru_cache(maxsize=1)  # a grammar needs it twice, and a schema of many patterns takes long
def _read_schema(source: str) -> Schema:
    """Returns the explicit schema, which callers do not change. Raises ``BadArgument``, with the path, for
    keywords that cannot be enforced."""
    schema = parse_schema(source)
    check_schema(schema)
    drop_unused_definitions(schema)
    check_kept(schema)
    return explicit(schema)


def _of_schema(source: str, whitespace: Whitespace) -> Regex | str:
    schema = _read_schema(source)
    regex = schema_to_regex(schema, whitespace)
    return _lark_of_schema(schema, whitespace) if regex is None else regex


def _lark_of_schema(schema: Schema, whitespace: Whitespace) -> str:
    # Unneeded escapes of letters could spell the name of a declared member a second time.
    options = {**_WHITESPACE[whitespace], "json_allowed_escapes": 'nrbtf\\"', "lenient": False}
    return (
        f"start: %json {json.dumps({**for_llguidance(schema), 'x-guidance': options})}\n{ALL_TOKENS_ALLOWED}"
    )


def _of_grammar(source: str) -> Regex | str:
    """Returns a grammar in GBNF as an expression, unless a rule contains itself: an expression has the masks
    of a DFA, and the library's parser counts every token that a rule may read."""
    if "root" in rule_names(source):
        with suppress(BadArgument):  # ``_of_lark`` raises it for the whole grammar
            if (regex := regex_of_gbnf(source)) is not None:
                return regex
    return _of_lark(source)


def _of_lark(source: str, end: str = "") -> str:
    """Returns the grammar. One in GBNF has ``end`` after each text."""
    names = rule_names(source)
    if names and "root" not in names:
        raise BadArgument(
            f"grammar: rules with ::= are GBNF, which needs a rule named root; found: {names[:8]}"
        )
    if attribute := _ATTRIBUTE_OF_GEN.search(source):
        raise BadArgument(f"grammar: {attribute[1]} must be set on the gen, not on a rule")
    try:
        grammar = f"{lark_of_gbnf(source, end) if names else marked(source)}\n{ALL_TOKENS_ALLOWED}"
    except BadArgument as error:
        raise BadArgument(f"grammar: {error}") from None
    _check_terminals(grammar)
    return grammar


def _tag_body(tag: TagRule, whitespace: Whitespace) -> TagBody:
    """Returns the compiled source of a tag. Rejects a source that no text can match, since nothing else could
    be generated after the tag's begin, and a grammar whose texts do not end."""
    try:
        if tag.kind == "grammar" and rule_names(tag.source):
            return _gbnf_body(tag)
        body: TagBody = _of_source(tag.kind, tag.source, whitespace)
        if tag.kind == "regex" and isinstance(body, str):
            body = pattern_with_end(_escaped(tag.source), tag.end)
        count = num_alternatives(_read_schema(tag.source)) if tag.kind == "schema" else 0
        alone = _checked(tag_alone(tag, body), tag.kind, count)
        if tag.kind == "grammar" and isinstance(body, str):
            _check_end(tag, body, alone)
        return body
    except BadArgument as error:
        why = str(error)
        if why.endswith(NOWHERE_TO_GO):
            why = f"no text of its {tag.kind} can precede the first {tag.end!r}: choose another end"
        raise BadArgument(f"tags: {tag.begin!r}: {why}") from None


def _gbnf_body(tag: TagRule) -> TagBody:
    """Returns a tag's grammar in GBNF. It ends at the first ``end`` after a whole text. If it is regular and
    small, it is one terminal, whose masks need no parser."""
    found = _of_grammar(tag.source)
    regex = None if isinstance(found, str) else found
    with suppress(BadArgument, RecursionError):  # the lexer's limits are lower than the parser's
        if regex is not None and num_positions(regex) <= MOST_POSITIONS:
            body = regex if _ends_once(regex, tag.end) else regex_with_end(regex, tag.end)
            _checked(tag_alone(tag, body), tag.kind, 0)
            return body
    body = WithEnd(_of_lark(tag.source, tag.end), regex)
    _checked(tag_alone(tag, body), tag.kind, 0)
    return body


def _ends_once(regex: Regex, end: str) -> bool:
    """Whether no text of the expression, with ``end`` after it, has ``end`` at an earlier place. In doubt,
    False."""
    ended = LookAhead(Concatenation((regex, literal(end))), wanted=True)
    try:
        build_dfa(Concatenation((ended, _ANY_TEXT, literal(end), ANY_CHAR, _ANY_TEXT)))
    except BadArgument:
        return True
    except TooLargeForDfa:
        pass
    return False


def _check_end(tag: TagRule, body: str, alone: str) -> None:
    """Raises ``BadArgument`` if the lexer of a body in Lark's notation takes the beginning of the tag's end
    for text wherever the body may end."""
    whole = LlguidanceGrammar(alone, _byte_vocabulary())
    end = tag.end.encode()
    num_bytes = 2 * _PLACES_WITHOUT_END
    with suppress(RequestRefused):
        for places in _written_texts(LlguidanceGrammar(body, _byte_vocabulary()), num_bytes):
            ended, num_refused = whole.matcher(), 0
            _accepted(ended, tag.lead.encode())
            for text, written in places:
                if written and not _accepted(ended, written[-1:]):
                    break  # it took the text before for the end, so this one is not written
                if num_refused + num_bytes - len(written) <= _PLACES_WITHOUT_END:
                    break  # the rest of the text is too short to change the result
                if not text.may_end():
                    continue
                num_taken = _accepted(ended, end)
                has_ended = num_taken == len(end) and ended.may_end()
                num_refused = 0 if has_ended else num_refused + 1
                ended.roll_back(num_taken)
                if num_refused > _PLACES_WITHOUT_END:
                    raise BadArgument(
                        f"grammar: its terminals take {tag.end!r} for text, so that the tag would not end: "
                        "give a regex or a grammar in GBNF, which stop there, or choose another end"
                    )


def _accepted(matcher: LlguidanceMatcher, text: bytes) -> int:
    """Appends the bytes of the text up to one that is not allowed. Returns their number."""
    for number, byte in enumerate(text):
        try:
            matcher.accept(byte)
        except ValueError:
            return number
    return len(text)


def _make_grammar(constraint: Constraint, compiled: Regex) -> str:
    """Returns the grammar of a constraint whose DFA would be too large."""
    if constraint.instead is None:
        return _as_grammar(constraint, compiled)
    other = constraint.instead
    return _either_grammar(constraint, _of_kind(constraint), other, _of_kind(other))


def _as_grammar(constraint: Constraint, compiled: Regex | str) -> str:
    if isinstance(compiled, str):
        return compiled
    if constraint.kind == "schema":
        return _lark_of_schema(_read_schema(constraint.source), constraint.whitespace)
    if constraint.kind == "tags":
        tags = constraint.tags()
        bodies = [
            _lark_of_schema(_read_schema(tag.source), constraint.whitespace)
            if tag.kind == "schema"
            else _tag_body(tag, constraint.whitespace)
            for tag in tags
        ]
        grammar = _of_tags(constraint, tags, bodies, is_small=False)
        assert isinstance(grammar, str)
        return grammar
    if constraint.kind == "grammar":
        return _of_lark(constraint.source)
    return _lark_of_pattern(write_pattern(compiled))


def _checked(grammar: str, kind: str, count: int) -> str:
    """Returns the grammar if the library accepts it and a text can begin under it.

    The library recurses over rules, and a stack overflow ends the process. This process may die, but not the
    engine's process, which parses the grammar again. A grammar that parses here with an eighth of the stack
    also parses there.
    """
    usual = threading.stack_size(SMALL_STACK_BYTES)
    try:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(_refuse_what_the_library_does, grammar, kind, count).result()
    finally:
        threading.stack_size(usual)
    return grammar


def _refuse_what_the_library_does(grammar: str, kind: str, count: int) -> None:
    vocabulary = _byte_vocabulary()
    try:
        compiled = LlguidanceGrammar(grammar, vocabulary, count)
    except RequestRefused as error:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(
            grammar, vocabulary.ll_tokenizer, limits=parser_limits(count, LEXER_STATES)
        )
        raise BadArgument(f"{kind}: {_explained(messages[0]) if is_error else error}") from None
    if warnings := compiled.fresh.get_grammar_warnings():
        raise BadArgument(f"{kind}: {_explained(warnings[0])}")
    try:
        text = compiled.matcher()
        can_begin = text.mask().any()
        text.forced()
        if kind not in ("schema", "tags"):
            for places in _written_texts(compiled):
                deque(places, maxlen=0)
    except RequestRefused as error:
        raise BadArgument(f"{kind}: {error}") from None
    if not can_begin:
        raise BadArgument(f"{kind}: {_ONLY_EMPTY}")


def _written_texts(
    grammar: LlguidanceGrammar, num_bytes: int = _TRIED_BYTES
) -> Iterator[Iterator[tuple[LlguidanceMatcher, bytes]]]:
    """Writes the beginnings of some texts, and yields the places of each. Raises ``RequestRefused`` if a step
    exceeds a limit, or a text can neither continue nor end. A pattern that is too ambiguous fails within some
    tens of characters, and a rule without texts fails where it begins."""
    tried: Counter[tuple[bytes, int]] = Counter()
    dice = random.Random(0)

    def places(number: int) -> Iterator[tuple[LlguidanceMatcher, bytes]]:
        text, written = grammar.matcher(), bytearray()
        for _ in range(num_bytes):
            yield text, bytes(written)
            try:
                mask = text.mask()
            except RequestRefused as error:
                raise RequestRefused(f"after {written.decode(errors='replace')!r}, {error}") from None
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            if not allowed:
                break
            here = mask.tobytes()
            if number < 2:
                byte = min(allowed) if number == 0 else dice.choice(allowed)
            else:  # the least frequent one so far, at places with the same allowed bytes
                byte = min(allowed, key=lambda byte: (tried[here, byte], dice.random()))
            tried[here, byte] += 1
            text.accept(byte)
            written.append(byte)

    return map(places, range(_TRIED_TEXTS))


def _check_terminals(grammar: str) -> None:
    """Raises ``BadArgument`` for a terminal that no text matches. The library detects it only where the
    terminal begins, after the text before it has been generated."""
    if "&" not in grammar and "~" not in grammar:
        return
    other = _START_OF_LARK.sub(r"\1start_of_text", grammar)
    for name in _TERMINAL_OF_LARK.findall(grammar):
        try:
            matcher = LlguidanceGrammar(f"{other}\nstart: {name}\n", _byte_vocabulary()).matcher()
        except RequestRefused:
            return  # the grammar is invalid, which is reported for the whole grammar
        try:
            matcher.mask()
        except RequestRefused:
            raise BadArgument(f"grammar: no text matches {name}") from None


def _explained(message: str) -> str:
    """Returns the part of the library's message that concerns the user's input."""
    about, *more = message.rpartition("failed to compile JSON schema: ")[2].strip().split("\n")
    if about.endswith("regex parse error:"):
        about += "".join([line.removeprefix("error:") for line in more if line.startswith("error:")])
    if keys := re.fullmatch(r"Unimplemented keys: \[(.*)\]", about):
        return f"unsupported keywords: {keys[1]}: check these in the program"
    if pointer := re.fullmatch(r"Pointer '(.*)' does not exist", about):
        return f"$ref refers to '#{pointer[1]}', which is not in the schema"
    if resource := re.match(r"Resource '(.*)' is not present", about):
        return f"{resource[1]!r} is not in the schema and is not fetched: write it into $defs"
    if "number out of range" in about:
        return "a constant is too large for the parser that this schema needs"
    return about


class _Bytes:
    """A vocabulary of single bytes, enough to check whether a grammar can be used."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def encode(self, text: str, *, continues: bool = False) -> list[int]:
        return list(text.encode())


@cache
def _byte_vocabulary() -> LlguidanceVocabulary:
    return LlguidanceVocabulary(_Bytes(), 256)
