"""Compile kernels for a GPU that is not there: registers, spills, stack.

Triton's own compiler and the ptxas and cuobjdump that it ships; no CUDA driver is needed. Triton
must not be in interpreter mode: tests do this in a subprocess.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainfuse.codegen.compiling import assertions, compiler_options, early_start
from trainfuse.codegen.cubin import resources
from trainfuse.codegen.ir import PREFIX, GroupKernel
from trainfuse.codegen.targets import Target

POINTER: dict[torch.dtype, str] = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What one launch's kernel takes. Sizes in bytes but for registers (32-bit, a thread)."""

    function: str
    registers: int
    stack: int
    shared: int
    ptx: str

    @property
    def vector_bytes(self) -> int:
        """Widest global load of the code; 16 is the most."""
        widths = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", self.ptx)
        return max((int(n or 1) * int(bits) // 8 for n, bits in widths), default=0)


def compile_only(
    kernel: GroupKernel,
    inputs: Sequence[torch.dtype],
    outputs: Sequence[torch.dtype],
    target: Target,
) -> list[Usage]:
    """Compile every launch of a kernel for target.arch.

    inputs, outputs: element types of the group's tensors, in order. A spill shows as stack: the
    worst spillers report few registers.
    """
    module = _imported(kernel.source)
    spaces = [dtype for _, dtype in kernel.workspaces]
    pools = {"input": list(inputs), "output": list(outputs), "workspace": spaces}
    found: list[Usage] = []
    for launch in kernel.launches:
        types = [POINTER[pools[kind][index]] for kind, index in launch.args]
        names = [f"{PREFIX[kind]}{index}" for kind, index in launch.args]
        source = ASTSource(
            getattr(module, launch.function),
            dict(zip(names, types, strict=True)),
            {},
            # Allocations are aligned; without this, loads don't vectorise.
            {(place,): [["tt.divisibility", 16]] for place in range(len(names))},
        )
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", target.capability, 32),
            options={
                **compiler_options(launch.num_warps, launch.max_registers),
                **early_start(kernel.source, launch.function),
                **assertions(kernel.source),
            },
        )
        found.append(_usage(launch.function, compiled))
    return found


def _usage(function: str, compiled: Any) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        taken = resources(Path(file.name))
    return Usage(
        function,
        taken["registers"],
        taken["stack"],
        compiled.metadata.shared,
        compiled.asm["ptx"],
    )


_NUMBERS = itertools.count()


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where the process writes the kernels that it compiles; goes with it."""
    return tempfile.TemporaryDirectory(prefix="trainfuse-check-")


def _imported(source: str) -> Any:
    """The module of a kernel's source; Triton reads function text back from its file."""
    path = Path(_folder().name) / f"kernels_{next(_NUMBERS)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("trainfuse_checked", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
