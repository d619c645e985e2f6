"""What can be appended to a state: text, variables, ``gen``, ``select``, roles, conversations, and sums of
these.

An expression is inert: the state turns it into ops when it is appended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeAlias, TypeVar, get_args

from agentflow.errors import BadArgument
from agentflow.language.values import ValueType
from agentflow.protocol.chat import Conversation
from agentflow.protocol.ops import Role, SelectMethod, check_choices
from agentflow.protocol.sampling import SamplingParams

ItemT = TypeVar("ItemT")
ValueT = TypeVar("ValueT")


class Expression:
    """Base of variables and of what ``gen``, ``select`` and the roles return. ``+`` puts them in a row."""

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
            if not isinstance(part, str | Expression):
                raise not_appendable(part)
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


class ConversationExpression(Expression):
    """A whole conversation, and the beginning of the assistant's turn."""

    __slots__ = ("conversation",)

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation


Appendable: TypeAlias = str | Expression


def select(
    name: str, choices: Sequence[str], *, method: SelectMethod = "token_length_normalized"
) -> SelectExpression:
    """The likeliest of ``choices``, as variable ``name``.

    ``method`` says what is compared: ``token_length_normalized`` the mean log-probability of a choice's
    tokens; ``greedy_token_selection`` for how many tokens a choice follows the walk that takes, token by
    token, the likeliest next one; ``unconditional_likelihood_normalized`` the mean, less what it is with no
    text before (so that what is likely anyway does not win by that). ``s["verdict"].choices`` has each
    choice's score under the method, the largest for the one that is taken.

    A choice's tokens are those from the first one on in which choices differ, each encoded together with
    the text before. So it does not matter whether a space, or words that all choices begin with, stand at
    the end of the prompt or in the choices.

    >>> s += af.user("Is it about science?")
    >>> s += af.assistant(af.select("verdict", ["yes", "no"]))
    >>> await s["verdict"]
    'yes'
    """
    check_name(name, "select")
    where = f"select({name!r})"
    texts = tuple_of(choices, f"{where}: choices", "strings")
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


def not_appendable(item: object) -> BadArgument:
    """The error for what is no ``Appendable``."""
    return BadArgument(
        f"cannot append {type(item).__name__} {item!r}: "
        "append a string, a variable, gen, select, image, a role or a conversation"
    )


def check_name(name: str, what: str) -> None:
    """``BadArgument`` where ``what`` got no name for its variable."""
    if not isinstance(name, str) or not name:
        raise BadArgument(f'{what} needs a name for its variable, as in {what}("answer"), not {name!r}')


def tuple_of(values: Iterable[ItemT], where: str, wanted: str) -> tuple[ItemT, ...]:
    """The values, or ``BadArgument`` that says what ``where`` wanted."""
    try:
        return tuple(values)
    except TypeError:
        raise BadArgument(f"{where} must be a list of {wanted}, not {values!r}") from None
