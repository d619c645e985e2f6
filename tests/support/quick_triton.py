"""Makes Triton's interpreter, in which tests run the kernels for GPUs, faster: it looks up what it would
compute again for each operation, and leaves out results that nothing reads."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Any


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
    _share_shapes(sys.modules["triton.language.core"])


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


def _share_shapes(core: Any) -> None:
    """Types of blocks, and tensors, have objects for their shape and for each of its numbers. These never
    change."""
    make_type, types = core.block_type.__init__, {}
    make_tensor, shapes = core.tensor.__init__, {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(n.value if isinstance(n, core.constexpr) else n for n in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = (self.shape, self.numel, self.name)
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
