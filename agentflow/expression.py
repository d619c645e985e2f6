"""What can be appended to a state: text, variables, ``gen``, ``select``, roles, and sums of these.

An expression is inert: the state turns it into ops when it is appended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar, get_args

from agentflow.errors import BadArgument
from agentflow.ops import Role, SelectMethod, check_choices
from agentflow.sampling import SamplingParams

if TYPE_CHECKING:
    from agentflow.variable import Variable

ItemT = TypeVar("ItemT")


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


class GenExpression(Expression):
    """A generation into the variable ``name``."""

    __slots__ = ("name", "params")

    def __init__(self, name: str, params: SamplingParams) -> None:
        self.name = name
        self.params = params


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


Appendable: TypeAlias = "str | Expression | Variable"


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
) -> GenExpression:
    """Text that the model writes, as variable ``name``.

    Ends after ``max_tokens`` tokens, before the first of the ``stop`` strings (which is not part of
    the text), at one of ``stop_token_ids``, or at the model's own end token (unless ``ignore_eos``).
    ``temperature`` 0 (the default) is greedy; see ``SamplingParams`` for the others.

    >>> s += af.assistant(af.gen("answer", max_tokens=32, stop="\\n"))
    """
    _check_name(name, "gen")
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
    return GenExpression(name, params.check())


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


def _check_name(name: str, what: str) -> None:
    if not isinstance(name, str) or not name:
        raise BadArgument(f'{what} needs a name for its variable, as in {what}("answer"), not {name!r}')


def _tuple_of(values: Iterable[ItemT], where: str, wanted: str) -> tuple[ItemT, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise BadArgument(f"{where} must be a list of {wanted}, not {values!r}") from None
