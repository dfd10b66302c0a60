"""Where AOTAutograd traces other than eager computes, and what replaces that: private to torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

from autodiff.upsampling import upsample_linear
from trainfuse.capture.overlap import may_overlap_itself


@contextlib.contextmanager
def traced_as_eager() -> Iterator[None]:
    """What AOTAutograd traces within computes what eager does, laid out as eager's."""
    with (
        _weighted_upsampling(),
        _cotangents_like_outputs(),
        _dropout_of_nothing_is_its_input(),
        _nothing_donated(),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within, an attribute of a module or class is another."""
    stock = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, stock)


def _weighted_upsampling() -> contextlib.AbstractContextManager[None]:
    """Linear interpolation within is decomposed by our formula.

    A table wouldn't do: bilinear2d is taken to pieces by its own Autograd kernel in Python.
    """
    stock = decompositions._upsample_linear

    def chosen(x: Tensor, *args: Any) -> Tensor:
        return upsample_linear(x, *args) if x.is_floating_point() else stock(x, *args)

    return _replaced(decompositions, "_upsample_linear", chosen)


def _nothing_donated() -> contextlib.AbstractContextManager[None]:
    """Let no backward overwrite what it was saved.

    AOTAutograd refuses retain_graph for one that may, unless its first run was with retain_graph;
    switching the donation off by its flag makes it refuse always.
    """
    return _replaced(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_: [])


def _cotangents_like_outputs() -> contextlib.AbstractContextManager[None]:
    """Cotangents within are expected laid out as their outputs, so that gradients are as eager's.

    Those of an output whose elements may share memory are expected dense: its layout holds no
    cotangent. torch 2.11 expects all of them dense. 2.14 tells expanded outputs only from the rest:
    it lays a cotangent of sliding windows (`unfold`) over itself, and the gradient is wrong.
    """
    stock = MemoryFormatMeta.from_tensor

    def chosen(value: Tensor, *args: Any, **kwargs: Any) -> Any:
        known = all(isinstance(n, int) for n in value.shape)
        if not known or value.layout is not torch.strided:
            return stock(value, *args, **kwargs)
        guess = not may_overlap_itself(value)
        with torch._functorch.config.patch(guess_tangent_strides_as_outputs=guess):
            return stock(value, *args, **kwargs)

    return _replaced(MemoryFormatMeta, "from_tensor", staticmethod(chosen))


@contextlib.contextmanager
def _dropout_of_nothing_is_its_input() -> Iterator[None]:
    """Dropout that drops nothing gives its input within, as in eager; torch 2.11 traces a copy."""
    op = torch.ops.aten.dropout.default
    stock = dict(op.py_kernels)

    def dropout(x: Tensor, p: float, train: bool | None) -> Tensor:
        return torch.ops.aten.native_dropout(x, p, train)[0] if train and p != 0 else x

    try:
        op.py_kernels.update(dict.fromkeys(stock, dropout))
        op._dispatch_cache.clear()
        yield
    finally:
        op.py_kernels.update(stock)
        op._dispatch_cache.clear()
