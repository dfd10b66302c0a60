"""numpy stand-ins for what Triton's interpreter can't run or gets wrong.

`triton_lib` puts this module in libdevice's place when TRITON_INTERPRET is set. Names are
libdevice's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Function = Callable[..., Any]


def _wrap(data: Any, like: Any) -> Any:
    """An interpreter tensor of `data`, with the element type of `like`."""
    scalar = like.type.scalar
    array = np.asarray(data, dtype=like.handle.data.dtype)
    if array.ndim == 0:
        # The interpreter keeps scalars in arrays of one element.
        return tl.core.tensor(TensorHandle(array.reshape(1), scalar), scalar)
    shape = tl.block_type(scalar, list(array.shape)) if like.type.is_block() else scalar
    return tl.core.tensor(TensorHandle(array, scalar), shape)


def _binary_op(self: Any, lhs: Any, rhs: Any, op: Function) -> Any:
    """The interpreter's, with comparisons of type int1.

    It gives them their operands' type: a comparison of two scalars becomes a float when it meets a
    tensor, and `&` takes no floats.
    """
    made = _stock_binary_op(self, lhs, rhs, op)
    truth = made.data.dtype == np.bool_
    return TensorHandle(made.data, tl.int1) if truth else made


_stock_binary_op = InterpreterBuilder.binary_op
InterpreterBuilder.binary_op = _binary_op


def _elementwise(function: Function) -> Function:
    def call(*args: Any) -> Any:
        like = next((arg for arg in args if arg.type.is_block()), args[0])
        with np.errstate(all="ignore"):
            # In fp64, rounded once: libdevice is nearer to that than numpy's fp32 functions are.
            data = (np.asarray(arg.handle.data, dtype=np.float64) for arg in args)
            return _wrap(function(*data), like)

    return call


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[float])(x)


def _erfc(x: Any) -> Any:
    return np.vectorize(math.erfc, otypes=[float])(x)


exp = fast_expf = _elementwise(np.exp)
exp2 = _elementwise(np.exp2)
expm1 = _elementwise(np.expm1)
log = _elementwise(np.log)
log2 = _elementwise(np.log2)
log10 = _elementwise(np.log10)
log1p = _elementwise(np.log1p)
sin = _elementwise(np.sin)
cos = _elementwise(np.cos)
tan = _elementwise(np.tan)
sinh = _elementwise(np.sinh)
cosh = _elementwise(np.cosh)
tanh = _elementwise(np.tanh)
asin = _elementwise(np.arcsin)
acos = _elementwise(np.arccos)
atan = _elementwise(np.arctan)
asinh = _elementwise(np.arcsinh)
acosh = _elementwise(np.arccosh)
atanh = _elementwise(np.arctanh)
atan2 = _elementwise(np.arctan2)
hypot = _elementwise(np.hypot)
erf = _elementwise(_erf)
erfc = _elementwise(_erfc)
sqrt = _elementwise(np.sqrt)
rsqrt = _elementwise(lambda x: 1 / np.sqrt(x))
pow = _elementwise(np.power)  # noqa: A001 -- libdevice's name
fmod = _elementwise(np.fmod)
trunc = _elementwise(np.trunc)
rint = _elementwise(np.rint)
copysign = _elementwise(np.copysign)


def fast_dividef(a: Any, b: Any) -> Any:
    """a / b, and 0 where |b| is above 2**126 and a finite; a may be a number."""
    x, y = getattr(a, "handle", None), b.handle.data
    x = np.asarray(a, y.dtype) if x is None else x.data
    with np.errstate(all="ignore"):
        return _wrap(np.where((np.abs(y) > 2.0**126) & np.isfinite(x), 0, x / y), b)


def signbit(x: Any) -> Any:
    """1 where the sign bit is set."""
    return _elementwise(np.signbit)(x)


def reduce_max(x: Any, axis: int, keep_dims: bool) -> Any:
    """Maximum along an axis; a NaN wins, as in ATen."""
    return _wrap(np.max(x.handle.data, axis=axis, keepdims=keep_dims), x)


def reduce_min(x: Any, axis: int, keep_dims: bool) -> Any:
    """Minimum along an axis; a NaN wins, as in ATen."""
    return _wrap(np.min(x.handle.data, axis=axis, keepdims=keep_dims), x)


def wait_for_previous() -> None:
    """Nothing: one launch is over before the next begins."""


def widen(x: Any) -> Any:
    """A half tile in fp32."""
    return x.to(tl.float32)


def product(a: Any, b: Any) -> tuple[Any, Any]:
    """Low and high words of a product of words."""
    whole = a.to(tl.uint64) * b.to(tl.uint64)
    return whole.to(tl.uint32), (whole >> 32).to(tl.uint32)


def reduce_sum(x: Any, axis: int, keep_dims: bool) -> Any:
    """Sum along an axis by halves, as a GPU's tree does; np.sum adds rows one after another."""
    data = np.moveaxis(x.handle.data, axis, 0)
    while data.shape[0] > 1:
        half = data.shape[0] // 2
        data = data[:half] + data[half:]
    return _wrap(np.expand_dims(data[0], axis) if keep_dims else data[0], x)


def reduce_sums(x: Any, y: Any, axis: int, keep_dims: bool) -> tuple[Any, Any]:
    """Two sums along an axis."""
    return reduce_sum(x, axis, keep_dims), reduce_sum(y, axis, keep_dims)
