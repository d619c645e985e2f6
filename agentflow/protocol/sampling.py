"""The sampling parameters of a gen, and their checks: ``GenParams`` as a program gives them,
``SamplingParams`` as an engine applies them.

``check_stop_regex`` checks a ``stop_regex`` in the frontend and in the engine. The frontend compiles it with
Python's ``re``; the engine searches with the package ``regex``, which can match growing text. Patterns that
both interpret differently are rejected, and so are patterns that would take much time or memory to
compile, because ``regex`` expands counted repeats.

``is_whole`` and ``is_number`` check numbers from programs. A generation without a seed gets a
``derived_seed``, which depends only on its place in the program.
"""

from __future__ import annotations

import functools
import hashlib
import re
import reprlib
from collections.abc import Callable, Mapping
from re import _compiler  # type: ignore[attr-defined]
from typing import Final

import msgspec

from agentflow.errors import BadArgument
from agentflow.protocol.bounds.client_pattern import MAX_WRITTEN_OUT, doubtful_set, is_verbose, written_out

MAX_STOP_REGEX_CHARS = 512

# Braces that are text to ``re``, but approximate matching to ``regex``, as in ``(?:end){e<=1}``.
_APPROXIMATE = re.compile(r"(?<!\\)(?:\\\\)*\{[\s\d<=]*[deis]\s*[<,}+:]")


def check_stop_regex(pattern: str) -> None:
    """Raises ``BadArgument`` if ``pattern`` cannot be a ``stop_regex``.

    >>> check_stop_regex(r"\\n(Question|Answer):")
    """
    if isinstance(pattern, str) and 0 < len(pattern) <= MAX_STOP_REGEX_CHARS:
        wrong = _what_is_wrong(pattern)
    else:
        wrong = f"must be a regular expression of 1 to {MAX_STOP_REGEX_CHARS} characters"
    if wrong:
        raise stop_regex_error(wrong, pattern)


def stop_regex_error(wrong: str, pattern: str) -> BadArgument:
    """The error for an invalid pattern. ``wrong`` begins with "must"."""
    shown = repr(pattern) if len(repr(pattern)) <= 100 else f"{pattern[:80]!r}…"
    return BadArgument(f"gen: stop_regex {wrong}, not {shown}", param="stop_regex")


MATCHES_NOTHING = "must not match the empty text, or it would end every text at once"
"""The error for patterns such as ``a*``. ``check_stop_regex`` does not detect them, because running a pattern
could take long."""


@functools.lru_cache(maxsize=256)
def _what_is_wrong(pattern: str) -> str:
    if _APPROXIMATE.search(pattern):
        return "must not have braces that ask for approximate matching (a literal brace is \\{)"
    if is_verbose(pattern):  # the only flag under which the two interpret braces differently
        return "must not use the verbose flag x"
    if doubtful := doubtful_set(pattern):
        return f"must be a regular expression that Python's re accepts (Possible {doubtful})"
    try:
        _compiler.compile(pattern)  # ``re.compile`` would keep it
    except (re.error, OverflowError, RecursionError) as error:
        return f"must be a regular expression that Python's re accepts ({error})"
    if written_out(pattern) > MAX_WRITTEN_OUT:
        return "must have smaller repeat counts (they are written out in memory)"
    return ""


def is_whole(value: object, low: float, high: float) -> bool:
    """Whether ``value`` is a whole number from ``low`` to ``high``, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object, low: float, high: float) -> bool:
    """Whether ``value`` is a number from ``low`` to ``high``, and neither a bool nor NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
# Counts and ids are 32-bit in the engine.
MAX_INT = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of one generation, each with a value.

    **Length.** ``max_tokens``: the maximum number of tokens to generate. ``min_tokens``: the minimum number
    of tokens of the text: token ids that would end it earlier are masked, and no stop begins in the text of
    these tokens. ``stop``: strings that end the text and are not part of it. ``stop_regex``: a regular
    expression (of Python's ``re``) that ends the text before its match, as soon as the text so far has one;
    ``$``, ``\\b`` and look-aheads see the text as if it ended there, so write ``END\\n`` rather than
    ``END$``. It must not match the empty text. ``stop_token_ids``: tokens that end the text. ``ignore_eos``:
    the model's end token does not end it. ``max_reasoning_tokens``: the maximum number of tokens of reasoning
    before the text, which also count towards ``max_tokens``; 0 turns reasoning off. None: no limit, but 0
    under a constraint.

    **Sampling.** The logits are changed in this order:

    1. ``repetition_penalty`` r, for all tokens in the prompt and the output: a logit above 0 is divided
       by r, others are multiplied by r (Keskar et al., "CTRL", 2019). Then ``frequency_penalty`` is
       subtracted once for each time that the token was generated, and ``presence_penalty`` once if it was.
    2. ``logit_bias``: pairs of a token id and the number added to its logit, -100 to 100.
    3. The ids that ``min_tokens`` masks.
    4. ``temperature``: with 0 (greedy, the default) the most likely token is chosen, and step 5 is skipped.
    5. ``top_k`` (0 is off), ``top_p`` (0 to 1], and ``min_p`` [0, 1] truncate the distribution.

    ``seed``: the same seed and prompt give the same text. Without one, the seed is derived from the session's
    seed and the op's place in its fork tree.

    **Log-probabilities.** ``logprobs``: report the log-probability of each token. ``top_logprobs``: report
    this many of the most likely tokens at each position; implies ``logprobs``. Both are computed from the
    unchanged logits.

    **Reasoning.** ``stream_reasoning``: a model's reasoning is sent while it is generated, not only in one
    piece with the value.

    >>> SamplingParams(temperature=0.8, top_p=0.9, logit_bias=((42, -100.0),)).check().top_p
    0.9
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_regex: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    max_reasoning_tokens: int | None = None
    stream_reasoning: bool = False

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are reported."""
        return self.logprobs or self.top_logprobs > 0

    def check(self) -> SamplingParams:
        """Returns itself, or raises ``BadArgument`` with the name of the wrong field."""
        for field, default in _DEFAULTS:
            if (value := getattr(self, field)) is default:
                continue
            is_valid, expected = _CHECKS[field]
            if not is_valid(self):
                raise BadArgument(f"gen: {field} must be {expected}, not {reprlib.repr(value)}", param=field)
        if self.stop_regex is not None:
            check_stop_regex(self.stop_regex)
        return self


def _may_be_least(params: SamplingParams) -> bool:
    most = params.max_tokens if isinstance(params.max_tokens, int) else MAX_INT
    return is_whole(params.min_tokens, 0, most)


_DEFAULTS: Final = tuple(
    [
        (name, default)
        for name, default in zip(
            SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True
        )
        if name != "stop_regex"
    ]
)
_BIASES: Final = f"at most {MAX_BIASES} different token ids, each with a number from -100 to 100"
_CHECKS: Final[Mapping[str, tuple[Callable[[SamplingParams], bool], str]]] = {
    "max_tokens": (lambda p: is_whole(p.max_tokens, 1, MAX_INT), f"a whole number from 1 to {MAX_INT}"),
    "min_tokens": (_may_be_least, "a whole number from 0 to max_tokens"),
    "stop": (lambda p: _are_stops(p.stop), f"at most {MAX_STOPS} strings, of 1 to {MAX_STOP_CHARS} chars"),
    "stop_token_ids": (
        lambda p: _are_ids(p.stop_token_ids),
        f"at most {MAX_BIASES} token ids, 0 or more",
    ),
    "ignore_eos": (lambda p: isinstance(p.ignore_eos, bool), "True or False"),
    "max_reasoning_tokens": (
        lambda p: is_whole(p.max_reasoning_tokens, 0, MAX_INT),
        "0 or more, or None",
    ),
    "temperature": (lambda p: is_number(p.temperature, 0.0, 100.0), "a number between 0 and 100"),
    "top_p": (lambda p: is_number(p.top_p, 0.0, 1.0) and p.top_p > 0, "above 0 and at most 1"),
    "top_k": (lambda p: is_whole(p.top_k, 0, MAX_INT), "0 (off) or a positive whole number"),
    "min_p": (lambda p: is_number(p.min_p, 0.0, 1.0), "a number between 0 and 1"),
    "frequency_penalty": (lambda p: is_number(p.frequency_penalty, -2.0, 2.0), "a number from -2 to 2"),
    "presence_penalty": (lambda p: is_number(p.presence_penalty, -2.0, 2.0), "a number from -2 to 2"),
    "repetition_penalty": (
        lambda p: is_number(p.repetition_penalty, 0.01, 100.0),
        "a number from 0.01 to 100 (1 is off)",
    ),
    "logit_bias": (lambda p: _are_biases(p.logit_bias), _BIASES),
    "seed": (lambda p: is_whole(p.seed, 0, 2**63 - 1), "a whole number below 2**63"),
    "logprobs": (lambda p: isinstance(p.logprobs, bool), "True or False"),
    "stream_reasoning": (lambda p: isinstance(p.stream_reasoning, bool), "True or False"),
    "top_logprobs": (
        lambda p: is_whole(p.top_logprobs, 0, MAX_TOP_LOGPROBS),
        f"a whole number from 0 to {MAX_TOP_LOGPROBS}",
    ),
}


class GenParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The parameters of a gen in a program: fields of ``SamplingParams``. None: the backend chooses the
    value. The engine then uses the default of ``SamplingParams``; nothing is sent to a model behind an API,
    because many APIs reject parameters, or have other defaults.

    >>> GenParams(temperature=0.0).given
    ('temperature',)
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_regex: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    max_reasoning_tokens: int | None = None
    stream_reasoning: bool = False

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the parameters with a value, except parameters that only report more."""
        found: list[str] = []
        for name in _CHANGING:
            value = getattr(self, name)
            # 0 equals False, and is a value that the program gives.
            if value is not None and value is not False and value != ():
                found.append(name)
        return tuple(found)

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are reported."""
        return self.logprobs or self.top_logprobs > 0

    def resolved(self) -> SamplingParams:
        """The parameters with the defaults of ``SamplingParams``."""
        given = {
            name: value for name, default in _GEN_DEFAULTS if (value := getattr(self, name)) is not default
        }
        return SamplingParams(**given)

    def check(self) -> GenParams:
        """Returns itself, or raises ``BadArgument`` with the name of the wrong field."""
        self.resolved().check()
        return self


_GEN_DEFAULTS: Final = tuple(zip(GenParams.__struct_fields__, GenParams.__struct_defaults__, strict=True))
_CHANGING = tuple(
    name
    for name in GenParams.__struct_fields__
    if name not in ("logprobs", "top_logprobs", "stream_reasoning")
)
"""The parameters that change the text."""


def _are_stops(values: object) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) <= MAX_STOPS
        and all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARS for stop in values)
    )


def _are_ids(values: object) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) <= MAX_BIASES
        and all(is_whole(token_id, 0, MAX_INT) for token_id in values)
    )


def _are_biases(values: object) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) <= MAX_BIASES
        and all(isinstance(pair, tuple) and len(pair) == 2 for pair in values)
        and all(is_whole(token, 0, MAX_INT) and is_number(bias, -100.0, 100.0) for token, bias in values)
        and len({token for token, _ in values}) == len(values)
    )


def seed_run(session_seed: int, index: int) -> str:
    """The ``run`` of ``derived_seed``: the session's seed and the run's index."""
    return f"{session_seed}/{index}"


def seed_place(path: tuple[int, ...], number: int) -> str:
    """The ``place`` of ``derived_seed``: the state's path in the fork tree, and the gen's number in the
    state."""
    return f"{path}/{number}"


def derived_seed(run: str, place: str) -> int:
    """A seed of 63 bits for a gen (the first 8 bytes of BLAKE2b, shifted right by one). ``run`` comes from
    ``seed_run``, ``place`` from ``seed_place``: a replay and a compiled graph derive the same seeds."""
    digest = hashlib.blake2b(f"{run}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
