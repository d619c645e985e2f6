"""What can be appended to a state: text, variables, ``gen``, ``select``, roles, and sums of these.

An expression is inert: the state turns it into ops when it is appended.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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

_IMAGE_STARTS = {"png": b"\x89PNG\r\n", "jpeg": b"\xff\xd8\xff", "gif": b"GIF8", "webp": b"RIFF"}


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
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    logprobs: bool = False,
    timeout_s: float | None = None,
    regex: str | None = None,
    schema: Any = None,
    choices: Sequence[str] | None = None,
    type: Any = None,
    tools: Sequence[Tool] | None = None,
    grammar: str | None = None,
) -> GenExpression[Any]:
    """Text that the model writes, as variable ``name``.

    Ends after ``max_tokens`` tokens, before the first of the ``stop`` strings (which is not part of
    the text), at one of ``stop_token_ids``, or at the model's own end token (unless ``ignore_eos``).
    ``temperature`` 0 (the default) is greedy; see ``SamplingParams`` for the others.

    One of these says what the text must be, and what its value is (text where none is given):
    ``regex`` (all of the text matches it), ``choices`` (one of these strings), ``grammar`` (Lark's
    notation), ``type`` (``int``, ``float``, ``bool``), ``schema`` (a pydantic model, a dataclass, a
    TypedDict, or a JSON schema as a dict: the value is of that type), ``tools`` (functions or OpenAI's
    tool schemas: the value is a list of ``ToolCall``). ``timeout_s``: what takes longer, from the gen's
    turn on, fails with ``DeadlineExceeded``.

    >>> s += af.assistant(af.gen("answer", max_tokens=32, stop="\\n"))
    >>> report = af.gen("report", schema=Report)
    >>> s += af.assistant(report)
    >>> value: Report = await s[report]
    """
    _check_name(name, "gen")
    check_timeout(timeout_s)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=(stop,) if isinstance(stop, str) else _tuple_of(stop, "gen: stop", "strings"),
        stop_token_ids=_tuple_of(stop_token_ids, "gen: stop_token_ids", "token ids"),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    wanted = value_type(regex=regex, schema=schema, choices=choices, type=type, tools=tools, grammar=grammar)
    return GenExpression(name, params.check(), wanted, timeout_s)


def select(
    name: str, choices: Sequence[str], *, method: SelectMethod = "token_length_normalized"
) -> SelectExpression:
    """The likeliest of ``choices``, as variable ``name``.

    ``token_length_normalized`` compares the mean log-probability of each choice's tokens.

    >>> s += af.assistant(af.select("verdict", ["yes", "no"]))
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

    >>> s += af.tool(json.dumps(result))
    """
    return RoleExpression("tool", parts)


def image(source: str | bytes | os.PathLike[str]) -> ImageExpression:
    """An image: a URL (``https:`` or ``data:``), the bytes of a file, or a file's path.

    Refused where the backend's model has no vision.

    >>> s += af.user(af.image("chart.png"), "What does the chart show?")
    """
    if isinstance(source, str) and source.startswith(("https:", "data:image/")):
        return ImageExpression(source)
    if isinstance(source, str) and source.startswith(("http:", "data:")):
        raise BadArgument(f"image: a URL must begin with https: or data:image/, not as {source[:40]!r} does")
    if isinstance(source, bytes):
        return ImageExpression(_data_url(source))
    if not isinstance(source, str | os.PathLike):
        raise BadArgument(f"image: give a URL, a file's path or its bytes, not {source!r:.80}")
    try:
        data = Path(source).read_bytes()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadArgument(f"image: {os.fspath(source)!r:.200} cannot be read: {why}") from None
    return ImageExpression(_data_url(data))


def _data_url(data: bytes) -> str:
    for kind, start in _IMAGE_STARTS.items():
        if data.startswith(start) and (kind != "webp" or data[8:12] == b"WEBP"):
            return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    raise BadArgument(f"image: {data[:12]!r}… is the start of no image: PNG, JPEG, GIF and WebP are known")


def _check_name(name: str, what: str) -> None:
    if not isinstance(name, str) or not name:
        raise BadArgument(f'{what} needs a name for its variable, as in {what}("answer"), not {name!r}')


def _tuple_of(values: Iterable[ItemT], where: str, wanted: str) -> tuple[ItemT, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise BadArgument(f"{where} must be a list of {wanted}, not {values!r}") from None
