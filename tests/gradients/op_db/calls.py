"""One sample of one operator as a function of tensors: made anew in any type, for each run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from tests.gradients.op_db.invocations import invocations


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor in a call's arguments."""

    index: int


def fill(template: Any, leaves: Sequence[torch.Tensor]) -> Any:
    """The arguments of which `template` holds the slots."""
    if isinstance(template, Slot):
        return leaves[template.index]
    if type(template) is tuple:
        return tuple([fill(part, leaves) for part in template])
    if type(template) is list:
        return [fill(part, leaves) for part in template]
    if type(template) is dict:
        return {name: fill(part, leaves) for name, part in template.items()}
    return template


@dataclass(frozen=True, slots=True)
class Call:
    """An operator and its arguments.

    leaves: the tensors among them, each once. template: the positional and named arguments, with
    slots for the tensors. process: what makes the result comparable (eigenvectors up to phase).
    name: of the operator, in messages.
    """

    op: Callable[..., Any]
    process: Callable[[Any], Any]
    template: tuple[tuple[Any, ...], dict[str, Any]]
    leaves: tuple[torch.Tensor, ...]
    name: str = ""

    @property
    def elements(self) -> int:
        """Elements of all leaves."""
        return sum(leaf.numel() for leaf in self.leaves)

    def __str__(self) -> str:
        def show(value: Any) -> Any:
            if not isinstance(value, Slot):
                return value
            leaf = self.leaves[value.index]
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"

        args, kwargs = pytree.tree_map(show, self.template)
        named = (f"{name}={value}" for name, value in kwargs.items())
        return f"{self.name}({', '.join([*map(str, args), *named])})"

    def function(self) -> Callable[..., Any]:
        """The operator as a function of the leaves; its result as `process` leaves it."""
        op, process, template = self.op, self.process, self.template

        def call(*leaves: torch.Tensor) -> Any:
            args, kwargs = fill(template, leaves)
            return process(op(*args, **kwargs))

        return call

    def fresh(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        """The leaves in memory of their own, floating ones in `dtype`, laid out as they were."""
        return tuple(own(leaf, dtype) for leaf in self.leaves)


FUSED_ATTENTION = frozenset(
    {torch.ops.aten._flash_attention_forward, torch.ops.aten._efficient_attention_forward}
)
"""Operators of which a GPU has no kernel for fp64. No kernel of ours takes their place either: what
we give is to be what eager gives."""


def of_sample(op: Any, sample: Any, name: str = "") -> Call:
    """The call that an OpInfo's sample stands for."""
    leaves: dict[int, torch.Tensor] = {}
    places: dict[int, Slot] = {}

    def slot(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in places:
            places[id(value)] = Slot(len(places))
            leaves[id(value)] = value
        return places[id(value)]

    args, kwargs = pytree.tree_map(slot, ((sample.input, *sample.args), sample.kwargs))
    process = _floating if op in FUSED_ATTENTION else sample.output_process_fn_grad
    return Call(op, process, (args, kwargs), tuple(leaves.values()), name)


def _floating(results: Sequence[Any]) -> list[Any]:
    """Without the seed and offset of a mask: nothing is written there when nothing is dropped."""
    return [t for t in results if isinstance(t, torch.Tensor) and t.is_floating_point()]


def joined(calls: Sequence[Call]) -> Call:
    """One call that makes several, on leaves of their own: compiled once, they cost less."""
    parts: list[tuple[Callable[..., Any], slice]] = []
    leaves: list[torch.Tensor] = []
    for call in calls:
        parts.append((call.function(), slice(len(leaves), len(leaves) + len(call.leaves))))
        leaves += call.leaves

    def together(*given: torch.Tensor) -> list[Any]:
        return [function(*given[place]) for function, place in parts]

    slots = tuple(Slot(i) for i in range(len(leaves)))
    return Call(together, lambda result: result, (slots, {}), tuple(leaves))


def scattered(call: Call) -> Call | None:
    """The call on tensors with gaps between their elements; None if it has none to scatter."""
    leaves = tuple(_with_gaps(leaf) for leaf in call.leaves)
    changed = any(a is not b for a, b in zip(leaves, call.leaves, strict=True))
    return replace(call, leaves=leaves) if changed else None


def permuted(call: Call) -> Call | None:
    """The call on dense tensors whose last two dims are swapped in memory; None if it has none."""
    leaves = tuple(_swapped(leaf) for leaf in call.leaves)
    changed = any(a is not b for a, b in zip(leaves, call.leaves, strict=True))
    return replace(call, leaves=leaves) if changed else None


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.dim() < 2 or not tensor.is_contiguous():
        return tensor
    if min(tensor.shape[-2:]) < 2 or tensor.is_conj() or tensor.is_neg():
        return tensor
    made = tensor.detach().mT.contiguous().mT
    return made.requires_grad_(tensor.requires_grad)


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.dim() == 0 or not tensor.is_contiguous():
        return tensor
    if tensor.numel() < 2 or tensor.is_conj() or tensor.is_neg():
        return tensor
    shape = tensor.shape
    room = tensor.new_full((*shape[:-1], shape[-1] * 2 + 1), 3)  # read by mistake, it shows
    gaps = room[..., 1::2]
    gaps.copy_(tensor.detach())
    return gaps.requires_grad_(tensor.requires_grad)


def own(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A leaf with the elements, strides and flag of `tensor`, in a storage of its own."""
    source = tensor.detach()
    wanted = source.dtype
    if dtype is not None and source.is_floating_point():
        wanted = dtype
    elif dtype is not None and source.is_complex():
        wanted = dtype.to_complex()
    if source.layout is not torch.strided:
        return source.clone().to(wanted).requires_grad_(tensor.requires_grad)
    if source.is_conj() or source.is_neg():
        return source.to(wanted, copy=True).requires_grad_(tensor.requires_grad)
    flat = torch.empty(0, dtype=source.dtype, device=source.device)
    flat = flat.set_(source.untyped_storage()).to(wanted, copy=True)
    made = torch.empty(0, dtype=wanted, device=flat.device)
    made.set_(flat.untyped_storage(), source.storage_offset(), source.shape, source.stride())
    return made.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def unseeded() -> Iterator[None]:
    """Random operators draw from the generator as they find it: op_db seeds it at every call."""

    def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    with mock.patch.object(invocations, "wrapper_set_seed", call):
        yield
