"""Pre-bound launches: grid, variant and argument order are fixed when a plan is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainfuse.runtime.cache import KernelCache, Variant
from trainfuse.runtime.compile_worker import load_source

if TYPE_CHECKING:
    from trainfuse.codegen.ir import GroupKernel
    from trainfuse.fusion.plan import FusionGroup

INTERPRETER = "interpreter"
_ALIGNMENT_MASK = 15
_TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


def pointer_type(dtype: torch.dtype) -> str:
    """Triton's name of a pointer to a dtype."""
    return _TYPES[dtype]


@dataclass(slots=True)
class _Bound:
    """A variant and, once it is loaded, its launch on this plan's grid."""

    variant: Variant
    runner: Callable[..., None] | None = None


class BoundFunction:
    """One Triton function with its grid and options, in an aligned and an unaligned variant.

    Called with tensors. On CUDA each variant is compiled at most once, loaded on first use, and
    called through Triton's own launcher with plain addresses. With the interpreter the function
    of the source file is called.
    """

    __slots__ = ("_aligned", "_arch", "_cache", "_folder", "_grid", "_interpreted", "_unaligned")

    def __init__(
        self,
        cache: KernelCache,
        folder: Path,
        arch: str,
        function: str,
        types: Sequence[str],
        grid: tuple[int, int, int],
        num_warps: int,
        max_registers: int | None,
        fma: bool,
    ) -> None:
        self._cache, self._folder, self._arch, self._grid = cache, folder, arch, grid
        self._aligned, self._unaligned = (
            _Bound(Variant(function, tuple(types), aligned, num_warps, max_registers, fma))
            for aligned in (True, False)
        )
        self._interpreted = None
        if arch == INTERPRETER:
            self._interpreted = getattr(load_source(folder / "kernel.py"), function)[grid]

    @property
    def wanted(self) -> tuple[Path, Variant]:
        """What to compile ahead: the aligned variant, which nearly every call uses."""
        return self._folder, self._aligned.variant

    def __call__(self, tensors: Iterable[Tensor]) -> None:
        """Launch on the current stream of the current device."""
        if self._interpreted is not None:
            self._interpreted(*tensors)
            return
        addresses = [t.data_ptr() for t in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        chosen = self._unaligned if bits & _ALIGNMENT_MASK else self._aligned
        runner = chosen.runner or self._bind(chosen)
        runner(*addresses)

    def load(self) -> None:
        """Load the aligned variant now rather than at the first launch."""
        if self._interpreted is None and self._aligned.runner is None:
            self._bind(self._aligned)

    def _bind(self, chosen: _Bound) -> Callable[..., None]:
        device = torch.cuda.current_device()
        kernel = self._cache.load(self._folder, chosen.variant, self._arch, device)
        runner = chosen.runner = kernel[self._grid]
        return runner


class GroupLauncher:
    """All launches of one group: inputs and outputs in, workspaces allocated here."""

    __slots__ = ("_device", "_launches", "_whole_vectors", "_workspaces")

    def __init__(
        self,
        group: FusionGroup,
        kernel: GroupKernel,
        cache: KernelCache,
        arch: str,
        *,
        fma: bool = True,
    ) -> None:
        values = [n.meta["val"] for n in (*group.inputs, *group.outputs)]
        dtypes = [v.dtype for v in values] + [dtype for _, dtype in kernel.workspaces]
        base = {"input": 0, "output": len(group.inputs), "workspace": len(values)}
        folder = cache.entry(kernel.key, kernel.source, arch)
        self._device = values[-1].device
        self._workspaces = kernel.workspaces
        self._whole_vectors = kernel.whole_vectors
        self._launches = []
        for launch in kernel.launches:
            order = [base[kind] + i for kind, i in launch.args]
            function = BoundFunction(
                cache,
                folder,
                arch,
                launch.function,
                [pointer_type(dtypes[i]) for i in order],
                launch.grid,
                launch.num_warps,
                launch.max_registers,
                fma and not group.exact,
            )
            self._launches.append((function, order))

    @property
    def wanted(self) -> list[tuple[Path, Variant]]:
        """Compilations that the first launch needs."""
        return [function.wanted for function, _ in self._launches]

    def load(self) -> None:
        """Load what a launch under capture could not."""
        for function, _ in self._launches:
            function.load()

    def __call__(self, inputs: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Run the group's kernels on the current stream."""
        if self._whole_vectors:
            inputs = [_aligned(t) for t in inputs]
        scratch = [
            torch.empty(shape, dtype=dtype, device=self._device)
            for shape, dtype in self._workspaces
        ]
        tensors = [*inputs, *out, *scratch]
        for function, order in self._launches:
            function([tensors[i] for i in order])


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one that begins amid 16 bytes and may be read in whole vectors."""
    odd = tensor.data_ptr() & _ALIGNMENT_MASK and tensor.is_contiguous()
    return tensor.clone() if odd else tensor
