"""Finds the outputs of a module call that a program only passes to other modules or to its caller.

``pending_use`` is called during the module call. It reads the source of the functions on the stack, up to one
of the roots, and finds every use of the call's result. Code is read, never run: names are looked up in the
frame, attributes in ``vars`` of their objects.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Container, Iterator
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, NamedTuple

import dspy

LEAVES: Final = (dspy.Predict, dspy.ChainOfThought)
# Their frames return the result of the call in them.
_THROUGH: Final = frozenset(
    (
        "dspy.primitives.module",
        "dspy.predict.predict",
        "dspy.predict.chain_of_thought",
        "dspy.utils.callback",
    )
)
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
# Arguments of ``dspy.Predict`` that are not inputs.
_SETTINGS: Final = frozenset(("signature", "demos", "config", "lm", "new_signature", "prediction", "_trace"))


class Use(NamedTuple):
    """How code uses the result of a call. ``fields``: the outputs that other modules get; None if any may be
    used. ``is_returned``: the function returns some of them. ``reason``: why the code needs the result; empty
    if it only passes it on."""

    fields: frozenset[str] | None = frozenset()
    is_returned: bool = False
    reason: str = ""


class UnwiredPart(NamedTuple):
    """A call of a module whose result the program needs before it continues, and the reason."""

    part: str
    reason: str


Names = Callable[[str], Any]


def pending_use(roots: Container[CodeType], depth: int = 1) -> Use:
    """Returns the use of the result of the module call that runs.

    Args:
        roots: The code objects of the functions that replace pending outputs in their results.
        depth: The number of frames to skip.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    callee: CodeType | None = None
    num_functions = 0
    while frame is not None and frame.f_code not in roots:
        if frame.f_globals.get("__name__") not in _THROUGH:
            inner, position = frame, _position(frame)
            if frame.f_code.co_name == "<listcomp>" and frame.f_back is not None:  # before Python 3.12
                frame = frame.f_back
            use = _use_in(frame, {**frame.f_locals, **inner.f_locals}, position, callee)
            if use.reason or not use.is_returned:
                return use if not num_functions else use._replace(fields=None)
            num_functions += 1
        callee = frame.f_code
        frame = frame.f_back
    return Use() if frame is not None else Use(reason="another thread or task makes the call")


def unwired_calls(
    module: Any, roots: Container[CodeType] = (), *, is_async: bool = False
) -> Iterator[UnwiredPart]:
    """Yields the calls that the code waits for, in the functions of the module and of its parts. ``roots``:
    as in ``pending_use``."""
    code = _code_of(module, is_async=is_async)
    if type(module) in LEAVES or code is None:
        return
    body = _body(code)
    if body is None:
        yield UnwiredPart(type(module).__name__, "the source of its function is not available")
        return
    names = _names_in(module, body)
    for call in body.calls():
        target = _resolved(call.func, names)
        if not isinstance(target, dspy.Module):
            continue
        part = ast.unparse(call.func).removeprefix("self.")
        if _code_of(target, is_async=is_async) in roots:
            yield UnwiredPart(part, f"line {body.line(call)}: it is wired separately")
            continue
        use = body.use_of(call, names)
        if use.reason:
            yield UnwiredPart(part, use.reason)
        if target is not module:
            yield from unwired_calls(target, roots, is_async=is_async)


def _use_in(
    frame: FrameType, local: dict[str, Any], position: tuple[int | None, ...], callee: CodeType | None
) -> Use:
    """The use of the result of the call at a position in the frame's function."""
    body = _body(frame.f_code)
    call = None if body is None else body.call_at(position)
    if body is None or call is None:
        return Use(reason=f"the source of {frame.f_code.co_name} is not available")

    def names(name: str) -> Any:
        return local.get(name, frame.f_globals.get(name))

    target = _resolved(call.func, names)
    if not isinstance(target, dspy.Module) and getattr(target, "__code__", None) is not callee:
        return Use(reason=f"line {body.line(call)}: {ast.unparse(call.func)} makes the call")
    return body.use_of(call, names)


def _position(frame: FrameType) -> tuple[int | None, ...]:
    positions = frame.f_code.co_positions()
    return next(islice(positions, frame.f_lasti // 2, None), ())


def _names_in(module: Any, body: _Body) -> Names:
    """The names that a function of the module has when it begins."""
    known = sys.modules.get(type(module).__module__)
    found = dict(vars(known)) if known is not None else {}
    if body.parameters:
        found[body.parameters[0]] = module
    return found.get


def _resolved(expression: ast.expr, names: Names) -> Any:
    """The object, if it can be found without running code; a module for its ``acall``."""
    match expression:
        case ast.Name(id=name):
            return names(name)
        case ast.Attribute(value=inner, attr=name):
            owner = _resolved(inner, names)
            if isinstance(owner, dspy.Module) and name == "acall":
                return owner
            if isinstance(owner, ModuleType):
                return vars(owner).get(name)
            members = getattr(owner, "__dict__", {})
            return members[name] if name in members else inspect.getattr_static(type(owner), name, None)
        case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
            owner = _resolved(inner, names)
            try:
                return owner[key] if type(owner) in (list, tuple, dict) else None
            except (LookupError, TypeError):
                return None
    return None


def _code_of(module: Any, *, is_async: bool) -> CodeType | None:
    function = inspect.getattr_static(type(module), "aforward" if is_async else "forward", None)
    return getattr(inspect.unwrap(function), "__code__", None) if function is not None else None


@lru_cache(maxsize=1000)
def _body(code: CodeType) -> _Body | None:
    """The syntax tree of a function; None if it has no source."""
    try:
        lines, first = inspect.getsourcelines(code)
        is_indented = lines[0][:1].isspace()
        tree = ast.parse("".join(["if 1:\n" if is_indented else "", *lines]))
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    found = tree.body[0]
    if isinstance(found, ast.If):
        found = found.body[0]
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) or found.name != code.co_name:
        return None
    return _Body(found, first - 1 - is_indented)


class _Body:
    """The syntax tree of a function, which begins ``num_before`` lines after the first of its file."""

    def __init__(self, function: ast.FunctionDef | ast.AsyncFunctionDef, num_before: int) -> None:
        self._function = function
        self._num_before = num_before
        self._nodes = list(ast.walk(function))
        self._parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        arguments = function.args
        self.parameters = [
            one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        ]

    def line(self, node: ast.expr) -> int:
        """The node's line in its file."""
        return node.lineno + self._num_before

    def calls(self) -> Iterator[ast.Call]:
        """The calls, from the first line to the last."""
        found = [node for node in self._nodes if isinstance(node, ast.Call)]
        yield from sorted(found, key=lambda node: (node.lineno, node.col_offset))

    def call_at(self, position: tuple[int | None, ...]) -> ast.Call | None:
        """The call, or the awaited call, of an instruction."""
        for node in self._nodes:
            if isinstance(node, ast.Call | ast.Await) and position == (
                self.line(node),
                (node.end_lineno or 0) + self._num_before,
                node.col_offset,
                node.end_col_offset,
            ):
                call = node.value if isinstance(node, ast.Await) else node
                return call if isinstance(call, ast.Call) else None
        return None

    def use_of(self, call: ast.Call, names: Names) -> Use:
        """The use of a call's result."""
        node: ast.expr = call
        if isinstance(self._parents[node], ast.Await):
            node = self._parents[node]  # type: ignore[assignment]
        for around in self._around(node):
            if isinstance(around, ast.Try | ast.TryStar):
                return Use(reason=f"line {self.line(node)}: a try statement is around it")
            if isinstance(around, ast.With | ast.AsyncWith) and not all(
                isinstance(item.context_expr, ast.Call)
                and ast.unparse(item.context_expr.func) in ("dspy.context", "dspy.settings.context")
                for item in around.items
            ):
                return Use(reason=f"line {self.line(node)}: a with statement is around it")
            if isinstance(around, _SCOPES):
                return Use(reason=f"line {self.line(node)}: it is in an inner function")
        if isinstance(self._parents[node], ast.Expr):
            return Use()
        return self._use(node, frozenset(), names, ())

    def uses_of_name(
        self,
        name: str,
        fields: frozenset[str],
        names: Names,
        seen: tuple[Any, ...],
        *,
        is_list: bool = False,
    ) -> Use:
        """The use of a result that the name stands for. ``fields``: its outputs, if it is not a prediction.
        ``is_list``: it is a list of predictions, or of outputs."""
        if (self, name) in seen:
            return Use()
        found = Use()
        for node in self._nodes:
            if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
                return Use(reason=f"{name} is not a local variable")
            if not isinstance(node, ast.Name) or node.id != name:
                continue
            if isinstance(self._parents[node], ast.AugAssign):
                return Use(reason=f"line {self.line(node)}: {name} is changed")
            if not isinstance(node.ctx, ast.Load):
                continue
            if any(isinstance(around, _SCOPES) for around in self._around(node)):
                return Use(reason=f"line {self.line(node)}: an inner function uses {name}")
            use = self._use(node, fields, names, (*seen, (self, name)), is_list=is_list)
            if use.reason:
                return use
            found = Use(
                (found.fields or frozenset()) | (use.fields or frozenset()),
                found.is_returned | use.is_returned,
            )
        return found

    def _use(
        self,
        node: ast.expr,
        fields: frozenset[str],
        names: Names,
        seen: tuple[Any, ...],
        *,
        is_list: bool = False,
    ) -> Use:
        """The use of an expression. The arguments are as in ``uses_of_name``."""
        parent = self._parents[node]
        match parent:
            case ast.Attribute(attr=name) if not fields and not is_list:
                return self._use(parent, frozenset((name,)), names, seen)
            case ast.Subscript(value=value, slice=ast.Constant(value=str() as name)) if value is node:
                if not fields and not is_list:
                    return self._use(parent, frozenset((name,)), names, seen)
            case ast.Subscript(value=value, slice=ast.Constant(value=int())) if value is node and is_list:
                return self._use(parent, fields, names, seen)
            case ast.ListComp(elt=value) if value is node and not is_list:
                return self._use(parent, fields, names, seen, is_list=True)
            case (
                ast.comprehension(iter=value, target=ast.Name(id=name), is_async=0)
                | ast.For(iter=value, target=ast.Name(id=name))
            ) if value is node and is_list:
                return self.uses_of_name(name, fields, names, seen)
            case ast.Return():
                return Use(fields, is_returned=True)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                use = self.uses_of_name(name, fields, names, seen, is_list=is_list)
                return use if use.fields is None else use._replace(fields=use.fields | fields)
            case ast.keyword(arg=str() as name):
                call = self._parents[parent]
                assert isinstance(call, ast.Call)
                target = _resolved(call.func, names)
                if target is dspy.Prediction and isinstance(self._parents[call], ast.Return):
                    return Use(fields, is_returned=True)
                is_async = isinstance(call.func, ast.Attribute) and call.func.attr == "acall"
                if fields and _passes_on(target, name, seen, is_async=is_async, is_list=is_list):
                    return Use(fields)
        shown = ast.unparse(node)
        return Use(reason=f"line {self.line(node)}: the program uses {shown[:60]}")

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        while (node := self._parents[node]) is not self._function:
            yield node


def _passes_on(target: Any, name: str, seen: tuple[Any, ...], *, is_async: bool, is_list: bool) -> bool:
    """Whether a module gives its input only to parts that do the same, down to predictors."""
    if type(target) in LEAVES:
        return name not in _SETTINGS
    code = _code_of(target, is_async=is_async) if isinstance(target, dspy.Module) else None
    body = None if code is None else _body(code)
    if body is None or name not in body.parameters:
        return False
    use = body.uses_of_name(name, frozenset((name,)), _names_in(target, body), seen, is_list=is_list)
    return not (use.reason or use.is_returned)
