"""What can be appended to a state: text, variables, ``gen``, ``select``, roles, and sums of these.

An expression is inert: the state turns it into ops when it is appended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypedDict, TypeVar, Unpack, get_args, overload

from agentflow.errors import BadArgument
from agentflow.ops import Role, SelectMethod, check_choices, check_timeout
from agentflow.sampling import SamplingParams
from agentflow.tool_call import Tool, ToolCall
from agentflow.value_type import ValueType, value_type

if TYPE_CHECKING:
    from agentflow.reference import Reference

ItemT = TypeVar("ItemT")
ValueT = TypeVar("ValueT")


class Expression:
    """Base of what ``gen``, ``select`` and the roles return. ``+`` puts expressions in a row."""

    __slots__ = ()

    def __add__(self, other: Appendable) -> Sequence_:
        return Sequence_((self, other))

    def __radd__(self, other: Appendable) -> Sequence_:
        return Sequence_((other, self))


class Sequence_(Expression):
    """Expressions in a row. Rows of rows become one, so that a long sum is not a deep one."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Appendable, ...]) -> None:
        flat: list[Appendable] = []
        for part in parts:
            flat += part.parts if isinstance(part, Sequence_) else (part,)
        self.parts: tuple[Appendable, ...] = tuple(flat)


class GenExpression(Expression, Generic[ValueT]):
    """A generation into the variable ``name``. ``s[expression]`` is that variable, with its type."""

    __slots__ = ("name", "params", "timeout_s", "value_type")

    def __init__(
        self, name: str, params: SamplingParams, value_type: ValueType, timeout_s: float | None = None
    ) -> None:
        self.name = name
        self.params = params
        self.value_type = value_type
        self.timeout_s = timeout_s


class SelectExpression(Expression):
    """A choice into the variable ``name``."""

    __slots__ = ("choices", "method", "name")

    def __init__(self, name: str, choices: tuple[str, ...], method: SelectMethod) -> None:
        self.name = name
        self.choices = choices
        self.method: SelectMethod = method


class RoleExpression(Expression):
    """A whole turn of the conversation."""

    __slots__ = ("parts", "role")

    def __init__(self, role: Role, parts: tuple[Appendable, ...]) -> None:
        self.role: Role = role
        self.parts = parts


class ImageExpression(Expression):
    """An image. ``source``: a ``data:`` or ``https:`` URL."""

    __slots__ = ("source",)

    def __init__(self, source: str) -> None:
        self.source = source


Appendable: TypeAlias = "str | Expression | Reference[Any]"


class SamplingOptions(TypedDict, total=False):
    """What ``gen`` takes besides its name and the type of its value; see there."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: bool
    min_tokens: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None
    stop_regex: str | None
    top_logprobs: int
    timeout_s: float | None


@overload
def gen(name: str, *, schema: type[ValueT], **options: Unpack[SamplingOptions]) -> GenExpression[ValueT]: ...
@overload
def gen(
    name: str, *, schema: Mapping[str, Any], **options: Unpack[SamplingOptions]
) -> GenExpression[Any]: ...
@overload
def gen(name: str, *, type: type[ValueT], **options: Unpack[SamplingOptions]) -> GenExpression[ValueT]: ...
@overload
def gen(
    name: str, *, tools: Sequence[Tool], **options: Unpack[SamplingOptions]
) -> GenExpression[list[ToolCall]]: ...
@overload
def gen(
    name: str,
    *,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    grammar: str | None = None,
    **options: Unpack[SamplingOptions],
) -> GenExpression[str]: ...


def gen(
    name: str,
    *,
    max_tokens: int = 256,
    min_tokens: int = 0,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    stop_regex: str | None = None,
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    logprobs: bool = False,
    top_logprobs: int = 0,
    timeout_s: float | None = None,
    regex: str | None = None,
    schema: Any = None,
    choices: Sequence[str] | None = None,
    type: Any = None,
    tools: Sequence[Tool] | None = None,
    grammar: str | None = None,
) -> GenExpression[Any]:
    """Text that the model writes, as variable ``name``.

    Ends after ``max_tokens`` tokens (256), before the first of the ``stop`` strings or the first match of
    ``stop_regex`` (neither is part of the text), at one of ``stop_token_ids``, or at the model's own end
    token (unless ``ignore_eos``); none of these acts before ``min_tokens`` tokens (0).
    The text before it should not end in a space: most models write words with the space in front.

    ``temperature`` 0 (the default) is greedy; ``top_k`` (0: off), ``top_p`` (1.0: off) and ``min_p``
    (0.0: off) cut the distribution. ``frequency_penalty`` and ``presence_penalty`` (-2 to 2, 0.0: off)
    act against tokens that were generated, ``repetition_penalty`` (1.0: off) also against those of the
    prompt; ``logit_bias`` maps token ids to what is added to their logits, -100 to 100. ``seed``: None
    takes one from the session's.

    ``logprobs``: the variable's ``logprobs`` are wanted; ``top_logprobs`` (0 to 20): and at each place so
    many likeliest tokens. ``SamplingParams`` says in which order these act. ``BadArgument`` names what is
    wrong; a backend that cannot do what is asked says so.

    One of these says what the text must be, and what its value is (text where none is given):
    ``regex`` (all of the text matches it), ``choices`` (one of these strings), ``grammar`` (Lark's
    notation), ``type`` (``int``, ``float``, ``bool``), ``schema`` (a pydantic model, a dataclass, a
    TypedDict, or a JSON schema as a dict: the value is of that type), ``tools`` (functions or OpenAI's
    tool schemas: the value is a list of ``ToolCall``). ``timeout_s``: what takes longer, from the gen's
    turn on, fails with ``DeadlineExceeded``.

    >>> s += af.user("What do plants do?")
    >>> s += af.assistant(af.gen("answer", max_tokens=32, stop="\\n"))
    >>> await s["answer"]
    'Plants turn light into sugar.'
    >>> report = af.gen("report", schema=Report)
    >>> s += af.user("Write a report.") + af.assistant(report)
    >>> await s[report]  # s["report"] is the same variable; this one's type is known
    Report(summary='Clear and well argued.', score=8)
    >>> legs = af.gen("legs", type=int)
    >>> s += af.user("How many legs has a spider?") + af.assistant(legs)
    >>> await s[legs]
    8
    >>> s += af.assistant(af.gen("idea", temperature=1.0, min_tokens=8, presence_penalty=0.5))
    """
    _check_name(name, "gen")
    check_timeout(timeout_s)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_bias_pairs(logit_bias),
        seed=seed,
        stop=(stop,) if isinstance(stop, str) else _tuple_of(stop, "gen: stop", "strings"),
        stop_regex=stop_regex,
        stop_token_ids=_tuple_of(stop_token_ids, "gen: stop_token_ids", "token ids"),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )
    wanted = value_type(regex=regex, schema=schema, choices=choices, type=type, tools=tools, grammar=grammar)
    return GenExpression(name, params.check(), wanted, timeout_s)


def select(
    name: str, choices: Sequence[str], *, method: SelectMethod = "token_length_normalized"
) -> SelectExpression:
    """The likeliest of ``choices``, as variable ``name``.

    ``method`` says what is compared: ``token_length_normalized`` the mean log-probability of a choice's
    tokens; ``greedy_token_selection`` token by token the likeliest next one; with
    ``unconditional_likelihood_normalized`` the mean, less what it is with no text before (so that what is
    likely anyway does not win by that). ``s["verdict"].choices`` has each choice's log-probability.

    >>> s += af.user("Is it about science?")
    >>> s += af.assistant(af.select("verdict", ["yes", "no"]))
    >>> await s["verdict"]
    'yes'
    """
    _check_name(name, "select")
    where = f"select({name!r})"
    texts = _tuple_of(choices, f"{where}: choices", "strings")
    if isinstance(choices, str) or not all(isinstance(choice, str) for choice in texts):
        raise BadArgument(f"{where}: choices must be a list of strings, not {choices!r}")
    check_choices(name, texts)
    if method not in get_args(SelectMethod):
        known = ", ".join(get_args(SelectMethod))
        raise BadArgument(f"{where}: there is no method {method!r} (there are: {known})")
    return SelectExpression(name, texts, method)


def system(*parts: Appendable) -> RoleExpression:
    """A system turn.

    >>> s += af.system("You are a strict judge of essays.")
    """
    return RoleExpression("system", parts)


def user(*parts: Appendable) -> RoleExpression:
    """A user turn.

    >>> s += af.user("Is it about science?")
    """
    return RoleExpression("user", parts)


def assistant(*parts: Appendable) -> RoleExpression:
    """An assistant turn; what is generated in it follows the model's chat template.

    >>> s += af.assistant("The answer is ", af.gen("answer", max_tokens=8))
    """
    return RoleExpression("assistant", parts)


def tool(*parts: Appendable) -> RoleExpression:
    """A turn with what a tool gave.

    >>> s += af.tool(json.dumps({"temperature": 12}))
    """
    return RoleExpression("tool", parts)


def _check_name(name: str, what: str) -> None:
    if not isinstance(name, str) or not name:
        raise BadArgument(f'{what} needs a name for its variable, as in {what}("answer"), not {name!r}')


def _tuple_of(values: Iterable[ItemT], where: str, wanted: str) -> tuple[ItemT, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise BadArgument(f"{where} must be a list of {wanted}, not {values!r}") from None


def _bias_pairs(biases: Mapping[int, float] | None) -> tuple[tuple[int, float], ...]:
    if biases is None:
        return ()
    if not isinstance(biases, Mapping):
        raise BadArgument(f"gen: logit_bias must be a dict of token id to number, not {biases!r}")
    pairs = tuple(biases.items())
    # Equal biases are equal parameters, whatever their order; what is no id, the check refuses.
    return tuple(sorted(pairs)) if all(isinstance(token, int) for token in biases) else pairs
