"""Messages for typical mistakes, with the code to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from agentflow.errors import (
    AgentflowError,
    BadArgument,
    ProgramError,
    UnknownVariable,
    add_note,
    short_repr,
    shown_error,
)
from agentflow.language.failures.stack_frames import ProgramLine


class AsyncOnly:
    """Base of classes that need ``async with`` or ``async for``."""

    __slots__ = ()

    if not TYPE_CHECKING:  # type checkers reject it by its absence

        def __enter__(self) -> NoReturn:
            raise BadArgument(
                f"{_kind(self)} needs `async with`, in an async function, not `with`: a script without one "
                "calls af.run(program, …)"
            )

        def __exit__(self, *error: object) -> None:
            pass


def needs_async_for(item: object) -> BadArgument:
    """The error for a ``for`` over an object that needs ``async for``."""
    return BadArgument(f"{_kind(item)} needs `async for`, in an async function, not `for`")


def _kind(item: object) -> str:
    return f"a {type(item).__name__}"


def no_loop() -> ProgramError:
    """The error where no event loop runs, such as in a cell of IPython's terminal without an ``await``."""
    return ProgramError(
        "no event loop runs here: do this in an async function; in IPython's terminal, in a cell with an "
        "`await`, such as `await s`; in a thread, by anyio.from_thread.run_sync"
    )


def unknown_variable(
    name: object, known: Iterable[str], branches: Iterable[tuple[Any, Any]]
) -> UnknownVariable:
    """The error for ``s[name]``. ``branches``: the paths of the state's forks, and the names of their
    variables."""
    names = list(known)
    has = ", ".join(map(repr, names)) or "none yet"
    message = f"this state has no variable {name!r} (it has: {has}): "
    where = [path for path, of_branch in branches if name in of_branch]
    near = difflib.get_close_matches(name, names, 1) if isinstance(name, str) else []
    if where:
        message += f"its branch {where[0]} does, as in branches[{where[0][-1]}][{name!r}]"
    else:
        message += f"did you mean {near[0]!r}?" if near else "append its gen first"
    return UnknownVariable(message, variable=name if isinstance(name, str) else None, known=names)


_REFERENCE = re.compile(r"\b(Variable|Transformed)\b")
_SHOWN_REFERENCE = re.compile(r"(<|`|input_type=)(Variable|Transformed)\b")
"""A ``ValueError`` with the bare word may be one of the program, about a variable of another kind."""


def explain(error: BaseException) -> None:
    """Adds a note to an error of Python or a library whose cause is a variable in place of its value, as in
    ``json.dumps(s["x"])`` and ``Report(text=s["x"])``."""
    if isinstance(error, AgentflowError) or not isinstance(error, TypeError | ValueError):
        return
    reference = _REFERENCE if isinstance(error, TypeError) else _SHOWN_REFERENCE
    if reference.search(shown_error(error, str)):
        add_note(
            error,
            "a Variable is a reference, not its value: await it first, as in `value = await s['answer']`",
        )


def defined_at(function: Callable[..., Any]) -> str:
    """The function, with the line that defines it."""
    plain = getattr(function, "__wrapped__", function)
    code = getattr(plain, "__code__", None)
    name = getattr(plain, "__name__", short_repr(function))
    return name if code is None else str(ProgramLine(code.co_filename, code.co_firstlineno, name))


def unfit_arguments(error: BaseException, item: object) -> str | None:
    """Advice if the program did not accept ``item``, an input of ``flow.map``, as its arguments."""
    if not isinstance(error, TypeError) or "argument" not in shown_error(error, str):
        return None
    if isinstance(item, tuple):
        return (
            "a tuple is the program's positional arguments: to pass it as one argument, wrap it: "
            "[(item,) for item in inputs]"
        )
    if isinstance(item, dict):
        return (
            "a dict is the program's keyword arguments: to pass it as one argument, wrap it: "
            "[(item,) for item in inputs]"
        )
    return "an input that is no tuple and no dict is the program's one argument after the state"
