"""One call differentiated: by itself, or as a training step; eagerly, in fp64, or compiled."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tests.gradients.op_db.calls import FUSED_ATTENTION, Call, own, unseeded
from tests.gradients.op_db.draws import Draws
from trainfuse.capture.overlap import may_overlap_itself
from trainfuse.testing.reference import double_precision, fused_masks
from trainfuse.testing.trees import tensors

Function = Callable[..., Any]
Compile = Callable[[Function], Function]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run gave.

    outputs, gradients: detached; None for no gradient. flags: which outputs require a gradient.
    aliases: for each output, which leaf's memory it shares, or None. written: leaves whose elements
    the run changed. loose: gradients whose layout says nothing, of leaves that leave gaps in
    memory: `.grad` is laid out anew. loss: of a training step; room: what rounding may do to it.
    traced: the same under a dispatch mode, as in any trace, where ATen derives some operators
    otherwise (`ormqr`): their gradients may be laid out as there.
    """

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    flags: tuple[bool, ...] = ()
    aliases: tuple[int | None, ...] = ()
    written: tuple[int, ...] = ()
    loose: frozenset[int] = frozenset()
    loss: Tensor | None = None
    room: float = 0.0
    traced: Outcome | None = None

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """Outputs that require a gradient."""
        return tuple(o for o, flag in zip(self.outputs, self.flags, strict=True) if flag)


def cotangents(outputs: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Random numbers laid out as the outputs; as the types of `like` have them, the same otherwise.

    like: eager's outputs, for the reference: it is given the numbers that eager was given.
    """
    generator = torch.Generator().manual_seed(7)
    made = []
    for output, narrow in zip(outputs, outputs if like is None else like, strict=True):
        if output.layout is not torch.strided:
            made.append(_sparse_like(output.detach(), generator))
            continue
        random = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        if output.is_complex():
            imaginary = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            random = torch.complex(random, imaginary)
        rounded = narrow.detach().new_empty(random.shape).copy_(random)  # a cast would be lifted
        made.append(_room_for(output.detach()).copy_(rounded))
    return made


def _room_for(output: Tensor) -> Tensor:
    """Uninitialised memory laid out as the output, gaps and all; dense where it overlaps itself."""
    if may_overlap_itself(output):
        return torch.empty_like(output)
    return torch.empty_strided(
        output.shape, output.stride(), dtype=output.dtype, device=output.device
    )


def _sparse_like(output: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers where a sparse output has elements."""
    made = output.clone()
    values = made._values() if made.layout is torch.sparse_coo else made.values()
    values.copy_(torch.randn(values.shape, generator=generator, dtype=torch.float64))
    return made


def differentiate(
    function: Function, leaves: Sequence[Tensor], eager: Outcome | None = None
) -> Outcome:
    """Outputs, and gradients of the leaves under random cotangents, which are eager's if given."""
    before = [leaf.detach().clone() for leaf in leaves]
    torch.manual_seed(3)
    outputs = tensors(function(*leaves))
    roots = [output for output in outputs if output.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    gradients: Sequence[Tensor | None] = [None] * len(wanted)
    if roots and wanted:
        given = cotangents(roots, eager and eager.differentiable)
        gradients = torch.autograd.grad(roots, wanted, given, allow_unused=True)
    return Outcome(
        tuple(output.detach() for output in outputs),
        tuple(None if g is None else g.detach() for g in gradients),
        tuple(output.requires_grad for output in outputs),
        tuple(_alias(output, leaves) for output in outputs),
        tuple(i for i, leaf in enumerate(leaves) if _differ(leaf, before[i])),
        frozenset(i for i, leaf in enumerate(wanted) if not is_dense(leaf)),
    )


def differentiate_twice(
    function: Function, leaves: Sequence[Tensor], eager: Outcome | None = None
) -> Outcome:
    """As outputs what `differentiate` gives, and as gradients those of the first gradients."""
    torch.manual_seed(3)
    outputs = tensors(function(*leaves))
    roots = [output for output in outputs if output.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    theirs = eager and eager.differentiable
    given = cotangents(roots, theirs and theirs[: len(roots)])
    first = torch.autograd.grad(roots, wanted, given, allow_unused=True, create_graph=True)
    shown = [*outputs, *(g for g in first if g is not None)]
    again = [g for g in first if g is not None and g.requires_grad]
    second: Sequence[Tensor | None] = [None] * len(wanted)
    if again:
        given = cotangents(again, theirs and theirs[len(roots) :])
        second = torch.autograd.grad(again, wanted, given, allow_unused=True)
    return Outcome(
        tuple(output.detach() for output in shown),
        tuple(None if g is None else g.detach() for g in second),
        tuple(output.requires_grad for output in shown),
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill its memory, each once."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return True
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _alias(output: Tensor, leaves: Sequence[Tensor]) -> int | None:
    if output.layout is not torch.strided or not output.numel():
        return None
    address = output.untyped_storage().data_ptr()
    for place, leaf in enumerate(leaves):
        if leaf.layout is torch.strided and leaf.untyped_storage().data_ptr() == address:
            return place
    return None


def _differ(leaf: Tensor, old: Tensor) -> bool:
    if leaf.layout is not torch.strided:
        return False
    now = leaf.detach()
    return not torch.equal(now.isnan(), old.isnan()) or not torch.equal(
        now.nan_to_num(), old.nan_to_num()
    )


def training_step(function: Function) -> Function:
    """A step with work before and after the operator: what it is fused with.

    step(one, cotangents, *leaves): `one` is 1.0 as a 0-d tensor, which leaves every value as it is.
    """

    def step(one: Tensor, weights: Sequence[Tensor], *leaves: Tensor) -> Any:
        near = [leaf * one if leaf.requires_grad and not _sparse(leaf) else leaf for leaf in leaves]
        outputs = tensors(function(*near))
        differentiable = [output for output in outputs if output.requires_grad]
        loss = _weighed(one - one, differentiable, weights)
        loss.backward()
        return outputs, loss

    return step


def _weighed(loss: Tensor, outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """`loss`, and the sums of the outputs' products with their weights."""
    for output, weight in zip(outputs, weights, strict=True):
        if output.is_complex():
            pairs = torch.view_as_real(output.resolve_conj()), torch.view_as_real(weight)
            loss = loss + (pairs[0] * pairs[1]).sum()
        elif _sparse(output):
            loss = loss + (output.to_dense() * weight.to_dense()).sum()
        else:
            loss = loss + (output * weight).sum()
    return loss


def _sparse(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided


def train(step: Function, leaves: Sequence[Tensor], weights: Sequence[Tensor]) -> Outcome:
    """One training step; the gradients are those that it leaves behind."""
    dtype = next((leaf.dtype for leaf in leaves if leaf.requires_grad), torch.float32)
    one = torch.ones((), dtype=dtype.to_real(), device=weights[0].device)
    torch.manual_seed(3)
    outputs, loss = step(one, list(weights), *leaves)
    outputs = tensors(outputs)
    wanted = [leaf.grad for leaf in leaves if leaf.requires_grad]
    return Outcome(
        tuple(output.detach() for output in outputs),
        tuple(None if gradient is None else gradient.detach() for gradient in wanted),
        tuple(output.requires_grad for output in outputs),
        loss=loss.detach(),
    )


class _InTheirType(TorchFunctionMode):
    """Operators without fp64 run in the types that eager ran them in, amid a run in fp64.

    Operands that are as eager's give eager's results, whose error then counts as none. types: those
    of eager's run, call by call, which `recording` makes.
    """

    def __init__(self, types: list[torch.dtype], *, recording: bool) -> None:
        super().__init__()
        self.types, self.recording, self.count = types, recording, 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "overloadpacket", func) not in FUSED_ATTENTION:
            return func(*args, **(kwargs or {}))
        if self.recording:
            self.types.append(args[0].dtype)
            return func(*args, **(kwargs or {}))
        dtype, self.count = self.types[self.count], self.count + 1

        def narrow(value: Tensor) -> Tensor:
            return value.to(dtype) if value.dtype is torch.float64 else value

        def wide(value: Tensor) -> Tensor:
            return value.double() if value.is_floating_point() else value

        args, kwargs = pytree.tree_map_only(Tensor, narrow, (tuple(args), kwargs or {}))
        return pytree.tree_map_only(Tensor, wide, func(*args, **kwargs))


@contextlib.contextmanager
def world(
    double: bool = False, draws: Draws | None = None, types: list[torch.dtype] | None = None
) -> Iterator[None]:
    """Where a reference runs: with the compiled program's dropout masks.

    double: in fp64. draws, types: what random operators give, and in which types those ran that
    have no fp64, is recorded there, or taken from there in fp64.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(unseeded())
        stack.enter_context(fused_masks())
        if types is not None:  # outside the next: no cast of its own is lifted
            stack.enter_context(_InTheirType(types, recording=not double))
        if double:
            stack.enter_context(double_precision())
        if draws is not None:
            stack.enter_context(draws.replayed() if double else draws.recorded())
        yield


def references(
    call: Call, run: Callable[[Function, Sequence[Tensor], Outcome | None], Outcome] = differentiate
) -> tuple[Outcome, Outcome]:
    """(eager's, fp64's) outcome of a call by itself, run as `run` does."""
    return _both(call, lambda leaves, eager: run(call.function(), leaves, eager))


def _both(
    call: Call, run: Callable[[Sequence[Tensor], Outcome | None], Outcome]
) -> tuple[Outcome, Outcome]:
    """(eager's, fp64's) outcome of a call; fp64 is given the numbers that eager drew.

    run: of leaves, and eager's outcome where they are wide. Recording is a dispatch mode: what
    draws nothing is run again without it.
    """
    draws = Draws()
    types: list[torch.dtype] = []
    own, again, wide = call.fresh(), call.fresh(), call.fresh(torch.float64)
    with world(draws=draws, types=types):
        eager = run(own, None)
    with world(double=True, draws=draws, types=types):
        exact = run(wide, eager)
    if not draws.given:
        with world():
            eager = replace(run(again, None), traced=eager)
    return eager, exact


def spread(function: Function) -> Function:
    """The function on inputs with gaps in memory, which ATen takes one by one, not as vectors."""

    def gaps(leaf: Tensor) -> Tensor:
        if _sparse(leaf) or not leaf.is_floating_point():
            return leaf
        return torch.stack((leaf, leaf.detach()), -1)[..., 0]

    return lambda *leaves: function(*map(gaps, leaves))


def is_extremal(call: Call) -> bool:
    """Whether a leaf holds an infinity or a NaN."""
    floating = (t for t in call.leaves if not _sparse(t) and t.is_floating_point())
    return not all(bool(t.isfinite().all()) for t in floating)


def of_two_minds(call: Call, run: Callable[[Function], Outcome]) -> Outcome | None:
    """Eager's outcome where vectors and single elements may be treated differently: at NaN."""
    if not is_extremal(call):
        return None
    try:
        with world():
            return run(spread(call.function()))
    except RuntimeError:  # it writes its input, or takes no such layout
        return None


def take_step(function: Function, leaves: Sequence[Tensor]) -> Outcome:
    """A training step under cotangents like the outputs of the function by itself."""
    alone = differentiate(function, [own(leaf, None) for leaf in leaves])
    return train(training_step(function), leaves, cotangents(alone.differentiable))


def step_references(call: Call, weights: Sequence[Tensor]) -> tuple[Outcome, Outcome]:
    """(eager's, fp64's) outcome of a call as a training step.

    Where fp64's loss is no number, as of outputs that are the largest of their type (nan_to_num),
    its loss is that of eager's outputs.
    """
    doubled = [_double(weight) for weight in weights]
    step = training_step(call.function())
    eager, exact = _both(
        call, lambda leaves, eager: train(step, leaves, doubled if eager else weights)
    )
    assert exact.loss is not None
    if exact.loss.isfinite():
        return eager, replace(exact, room=_room(exact, eager, weights))
    loss = _weighed(exact.loss.new_zeros(()), [_double(o) for o in eager.differentiable], doubled)
    return eager, replace(exact, loss=loss, room=_room(eager, eager, weights))


def _double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _room(exact: Outcome, eager: Outcome, weights: Sequence[Tensor]) -> float:
    """Largest error of a sum of products by halves: a loss of terms of both signs may be near 0.

    The products of an output are added in its own type, which may be coarser than the loss's.
    Source: Higham, Accuracy and Stability of Numerical Algorithms, 4.2.
    """
    assert eager.loss is not None
    least = torch.finfo(eager.loss.dtype).eps
    room = 0.0
    count = 1
    types = [output.dtype for output in eager.differentiable]
    for output, weight, dtype in zip(exact.differentiable, weights, types, strict=True):
        if _sparse(output):
            output, weight = output.to_dense(), weight.to_dense()
        product = _double(output).abs() * _double(weight).abs()
        terms = float(product[product.isfinite()].sum())
        room += terms * max(torch.finfo(dtype).eps, least)
        count += output.numel()
    return room * (1 + math.log2(count))
