"""Makes Triton's interpreter, in which tests run the kernels for GPUs, faster: it looks up values that it
would compute again for each operation, and leaves out results that nothing reads."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Any

import numpy as np


def quicken_triton() -> None:
    """Changes the interpreter of this process, if anything has imported it."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter, "is_quick"):
        return
    interpreter.is_quick = True
    _patch_functions_once(interpreter)
    # Each sum and product of integers is computed again in 64 bits and compared with its bounds, for an
    # assertion that is left out as long as `debug` is false.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    _look_up_dtypes(interpreter)
    _look_up_floats(interpreter)
    core = sys.modules["triton.language.core"]
    _call_builtins_directly(interpreter, core)
    _look_at_usual_types_first(core)
    _share_shapes(core)
    _leave_equal_shapes(sys.modules["triton.language.semantic"].TritonSemantic)


def _patch_functions_once(interpreter: Any) -> None:
    """The functions of ``triton.language`` are replaced at each call of a kernel and of each function in it,
    for which all members of the modules are looked through."""
    patch_lang = interpreter._patch_lang

    @functools.cache
    def patch_once(function: object) -> object:
        patch_lang(function)
        return interpreter._LangPatchScope()  # restores nothing

    interpreter._patch_lang = patch_once


def _look_up_dtypes(interpreter: Any) -> None:
    """A table of all dtypes is made at each question for one."""
    find, found = interpreter._get_np_dtype, {}

    def look_up(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    interpreter._get_np_dtype = look_up


def _look_up_floats(interpreter: Any) -> None:
    """Floats become floats of another type bit by bit, in some thirty operations on arrays. Floats of 8 and
    16 bits are looked up in tables made by these operations, and float32 is cut to bfloat16 like they do it,
    except subnormal numbers."""
    convert, made = interpreter._convert_float, {}

    def convert_quickly(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name == "fp32" and target.name == "bf16" and rounding is None:
            return (data.view(np.uint32) >> 16).astype(np.uint16).reshape(data.shape)
        if source.primitive_bitwidth == 32:
            return convert(data, source, target, rounding)
        numbers = data.view(f"u{data.itemsize}")
        key = (source.name, target.name, rounding)
        if key not in made:
            made[key] = convert(
                np.arange(1 << 8 * data.itemsize, dtype=numbers.dtype), source, target, rounding
            )
        return made[key][numbers].reshape(data.shape)

    interpreter._convert_float = convert_quickly


def _share_shapes(core: Any) -> None:
    """Types of blocks, and tensors, have objects for their shape and for each of its numbers. These never
    change."""
    make_type, types, shapes_of_types = core.block_type.__init__, {}, {}
    make_tensor, shapes = core.tensor.__init__, {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = tuple(n.value if isinstance(n, core.constexpr) else n for n in shape)
        key = (element_ty.name, numbers)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = (shapes_of_types.setdefault(numbers, self.shape), self.numel, self.name)
        self.element_ty = element_ty
        self.shape, self.numel, self.name = types[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor


def _leave_equal_shapes(semantic: Any) -> None:
    """Blocks of one shape, and scalars, are compared number by number and stay unchanged."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() == right.is_block() and (not left.is_block() or left.shape is right.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_others


def _call_builtins_directly(interpreter: Any, core: Any) -> None:
    """Each function of the language is called through two others: one adds an argument, the other checks that
    it is there."""
    patch_attr, checks = interpreter._patch_attr, core.builtin(lambda: None).__code__

    def patch_directly(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is not checks:
            patch_attr(obj, name, member, builder, scope)
            return
        function, semantic = member.__wrapped__, interpreter.interpreter_semantic

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_directly


def _look_at_usual_types_first(core: Any) -> None:
    """Arguments may be constants, or lists of them, and are rarely; types are compared with themselves."""
    unwrap, constant = core._unwrap_if_constexpr, core.constexpr
    usual = {core.tensor, core.dtype, core.pointer_type, core.block_type, bool, int, float, str, type(None)}

    def unwrap_others(given: Any) -> Any:
        kind = type(given)
        if kind in usual:
            return given
        return given.value if kind is constant else unwrap(given)

    core._unwrap_if_constexpr = unwrap_others
    for kind in (core.dtype, core.pointer_type):

        def equals(self: Any, other: Any, compare: Any = kind.__eq__) -> Any:
            return self is other or compare(self, other)

        kind.__eq__ = equals
