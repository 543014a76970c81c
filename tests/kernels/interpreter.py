"""Triton's interpreter, made fit for our kernels: they then run on the CPU, one program after the other, in NumPy.

Triton decides when a kernel is defined whether it is interpreted: call `use_interpreter` before any module with kernels
is imported.
"""

import functools
import operator
import os
from typing import Any

import numpy as np


def use_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter  # noqa: PLC0415 (after the variable)

    if getattr(interpreter.InterpreterBuilder.create_dot, "__module__", None) == __name__:
        return  # done before
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.InterpreterBuilder.create_int_to_ptr = _create_int_to_ptr
    interpreter.InterpreterBuilder.cast_impl = _with_rounding(interpreter.InterpreterBuilder.cast_impl)
    interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    _patch_once_per_launch(interpreter)
    _make_types_once(interpreter)


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Triton 3.6 multiplies bfloat16 as the integers it keeps them in. And NumPy picks the order of additions by shape.

    As tensor cores: 16 products are added without rounding, then to the sum so far. So, as there, no tile shape
    changes a bit.
    """
    from triton.runtime.interpreter import TensorHandle  # noqa: PLC0415

    a64, b64, total = _float64(a), _float64(b), d.data
    for k in range(0, a64.shape[-1], 16):
        total = (total + a64[..., k : k + 16] @ b64[..., k : k + 16, :]).astype(d.data.dtype)
    return TensorHandle(total, d.dtype.scalar)


def _create_int_to_ptr(self: Any, address: Any, pointer_type: Any) -> Any:
    """Triton takes an address below 4 GiB for an int32, and cannot make a pointer of it. A heap may begin that low."""
    from triton.runtime.interpreter import TensorHandle  # noqa: PLC0415

    return TensorHandle(address.data.astype(np.uint64), pointer_type.scalar)


def _float64(handle: Any) -> np.ndarray:
    import triton.language as tl  # noqa: PLC0415

    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return handle.data.astype(np.float64)


def _with_rounding(cast: Any) -> Any:
    """Triton 3.6 cuts a float32 off where a bfloat16 ends. To the nearest, even if between two, as devices do."""
    import triton.language as tl  # noqa: PLC0415
    from triton.runtime.interpreter import TensorHandle  # noqa: PLC0415

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        rounded = np.where(np.isnan(source.data), 0x7FC0, rounded).astype(np.uint16)
        return TensorHandle(rounded.reshape(source.data.shape), tl.bfloat16)

    return cast_impl


def _with_index(patch: Any) -> Any:
    """Triton 3.6 says int(array of one element), so that no loop may end at a loaded number: NumPy 2.4 refuses."""

    def patch_also_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patch_also_index


def _patch_once_per_launch(interpreter: Any) -> None:
    """Triton replaces the whole language at each call of a function inside of a kernel, which takes a third of all the
    time. It has been replaced when the kernel was launched; only what that left out is left to do."""
    import triton.language as tl  # noqa: PLC0415

    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    languages: dict[int, frozenset[str]] = {}  # that a module sees, by the identity of its globals
    patched: set[str] = set()  # in this launch

    def seen_by(fn: Any) -> frozenset[str]:
        if id(fn.__globals__) not in languages:
            modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
            languages[id(fn.__globals__)] = frozenset(module.__name__ for module in modules)
        return languages[id(fn.__globals__)]

    def patch_what_is_left(fn: Any) -> Any:
        if patched and seen_by(fn) <= patched:
            return interpreter._LangPatchScope()
        patched.update(seen_by(fn))
        return patch_lang(fn)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.clear()  # what was replaced is restored

    interpreter._patch_lang = patch_what_is_left
    interpreter.GridExecutor.__call__ = launch_afresh


def _make_types_once(interpreter: Any) -> None:
    """Triton describes the shape and the type of every intermediate value anew, in objects of objects, which takes most
    of the time. Equal descriptions are one object here. And whether integers overflow is looked at in NumPy, not by a
    program of ten operations."""
    import triton.language as tl  # noqa: PLC0415
    from triton.language.semantic import TritonSemantic  # noqa: PLC0415

    plain_tensor, plain_block = tl.tensor.__init__, tl.block_type.__init__
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            plain_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in blocks:
            plain_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, str(self.shape)
        else:
            self.element_ty = element_ty
            self.shape, self.numel, words = blocks[key]
            self.name = f"<{words}, {element_ty}>"

    tl.tensor.__init__, tl.block_type.__init__ = make_tensor, make_block
    of_scalar = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: of_scalar(tl.uint64 if kind.scalar.is_ptr() else kind.scalar)
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow


def _check_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    kind = lhs.type.scalar
    if kind.int_bitwidth >= 64:
        return
    compute = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}[binary_op.__name__]
    exact = compute(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
    is_inside = exact.min() >= kind.get_int_min_value() and exact.max() <= kind.get_int_max_value()
    assert is_inside, f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}"
