"""Stand-alone scripts that show a fault: the text that ran, ATen's nodes, the inputs, versions."""

from __future__ import annotations

import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from autodiff.reference import widened_call
from trainfuse.codegen.compiling import compiler_options, early_start
from trainfuse.runtime.emit import RESERVED, Expressions, Namer, device_text
from trainfuse.runtime.layout import copy_to
from trainfuse.versions import installed

if TYPE_CHECKING:
    from trainfuse.codegen.ir import GroupKernel
    from trainfuse.fusion.plan import FusionGroup

LARGEST_BYTES = 2 << 30
"""Inputs beyond this are described, not saved: a full disk would stop the run."""
_ROOT = Path(__file__).parents[2]
LIBRARIES = (
    "autodiff/norms.py",
    "autodiff/compare.py",
    "autodiff/mismatch.py",
    "autodiff/philox.py",
    "trainfuse/codegen/interpreted.py",
    "trainfuse/codegen/triton_lib.py",
    "trainfuse/codegen/schedules/foreach_tables.py",
)
"""What scripts import, copied beside them: they need torch and Triton, not trainfuse."""

IMPORTS = """
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import philox  # registers trainfuse.seed and trainfuse.keep_mask
from mismatch import mismatch

aten, prims = torch.ops.aten, torch.ops.prims
inf, nan = float("inf"), float("nan")


def wide(value):
    if isinstance(value, (list, tuple)):
        return [wide(v) for v in value]
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value


def load():
    return torch.load(Path(__file__).with_suffix(".pt"), weights_only=True, map_location=DEVICE)


def judge(names, ours, native, exact):
    found = 0
    for name, mine, eager, fp64 in zip(names, ours, native, exact):
        wrong = mismatch(mine, eager, fp64, 2.0)
        found += wrong is not None
        print(f"{name}: {tuple(mine.shape)} {mine.dtype}: {wrong or 'right'}")
    print("the fault is here" if found else "no fault here")
    sys.exit(bool(found))
"""

_MAIN = """

def main():
    native, exact = reference(*load()), fp64(*load())
    judge([f"output {i}" for i in range(len(native))], ours(load()), native, exact)


if __name__ == "__main__":
    main()
"""


def write_repro(
    folder: Path | None,
    group: FusionGroup,
    kernel: GroupKernel,
    inputs: Sequence[Tensor],
    problem: str,
    shared: Mapping[int, int] | None = None,
) -> str:
    """Write `NAME-KEY.py`, and beside it the inputs and the modules that it imports.

    folder: None for a fresh temporary one. shared: outputs that are written into an input, by
    position. Returns the script's path. Run anywhere, it exits with 1 where the fault shows; it
    needs a device like this one, or TRITON_INTERPRET=1.
    """
    text = repro_text(group, kernel, problem, shared or {})
    return write(folder, f"{group.name}-{kernel.key[:12]}", text, list(inputs))


def write(
    folder: Path | None,
    name: str,
    text: str,
    inputs: Any,
    modules: Mapping[str, str] | None = None,
) -> str:
    """A script, its inputs (tensors in lists and dicts) and modules; returns the script's path."""
    place = Path(tempfile.mkdtemp(prefix="trainfuse-repro-")) if folder is None else folder
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{name}.py"
    size = sum(t.numel() * t.element_size() for t in _tensors(inputs))
    if size <= LARGEST_BYTES:
        torch.save(_saved(inputs), path.with_suffix(".pt"))
    else:
        text = f"# its inputs, {size / 2**30:.1f} GiB, were not saved\n{text}"
    path.write_text(text)
    for library in LIBRARIES:
        source = _ROOT / library
        (place / source.name).write_text(stand_alone(source.read_text()))
    for module, source in (modules or {}).items():
        (place / f"{module}.py").write_text(source)
    return str(path)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree
    return [t for child in children for t in _tensors(child)] if _nested(tree) else []


def _saved(tree: Any) -> Any:
    """The same nest with tensors on the host, in their own strides."""
    if isinstance(tree, Tensor):
        return copy_to(tree, torch.device("cpu"))
    if isinstance(tree, dict):
        return {key: _saved(value) for key, value in tree.items()}
    return [_saved(value) for value in tree] if _nested(tree) else tree


def _nested(tree: Any) -> bool:
    return isinstance(tree, list | tuple | dict)


# -- texts --------------------------------------------------------------------------------------


def repro_text(
    group: FusionGroup, kernel: GroupKernel, problem: str, shared: Mapping[int, int]
) -> str:
    """The script: kernel module, `run` (our launches), `reference` and `fp64` (ATen)."""
    device = group.outputs[0].meta["val"].device
    parts = [head(group.name, problem, device), kernel_text(kernel.source)]
    parts += [launch_text(kernel), run_text(group, shared)]
    parts += [
        aten_text(name, group.inputs, group.nodes, group.outputs, exact=exact)
        for name, exact in (("reference", False), ("fp64", True))
    ]
    return "".join([*parts, _MAIN])


def head(name: str, problem: str, device: torch.device) -> str:
    """What was found, where and with which versions; then what every script imports."""
    where = str(device)
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    ours = installed("trainfuse") or "from source"
    return (
        f"# {name}: {' '.join(problem.split())}\n"
        f"# torch {torch.__version__}, triton {installed('triton')}, trainfuse {ours},"
        f" Python {platform.python_version()}; on {where}\n"
        f"{IMPORTS}\nDEVICE = {device_text(device)}\n\n\n"
    )


def kernel_text(source: str) -> str:
    """A kernel's module, with what it imports beside it."""
    return re.sub(r"^from __future__ import .*\n", "", stand_alone(source), flags=re.M)


def stand_alone(source: str) -> str:
    """The text with imports of ours turned to the copies beside it."""
    source = re.sub(r"^( *)from trainfuse\.codegen(\.schedules)? import", r"\1import", source,
                    flags=re.M)  # fmt: skip
    source = re.sub(r"^( *)from trainfuse\.codegen(\.schedules)?\.", r"\1from ", source, flags=re.M)
    return re.sub(r"^( *)from \.(\w+) import", r"\1from \2 import", source, flags=re.M)


def run_text(group: FusionGroup, shared: Mapping[int, int]) -> str:
    """`def ours(inputs)`: memory for the outputs, then `run`."""
    lines = ["", "", "def ours(inputs):", "    outputs = ["]
    for i, node in enumerate(group.outputs):
        v = node.meta["val"]
        layout = f"{tuple(v.shape)}, {tuple(v.stride())}, dtype={v.dtype}, device=DEVICE"
        made = f"inputs[{shared[i]}]" if i in shared else f"torch.empty_strided({layout})"
        lines.append(f"        {made},")
    return "\n".join([*lines, "    ]", "    run(inputs, outputs)", "    return outputs", ""])


def launch_text(kernel: GroupKernel) -> str:
    """`def run(inputs, outputs)`: our launches."""
    lines = ["", "", "def run(inputs, outputs):", "    workspaces = ["]
    for shape, dtype in kernel.workspaces:
        lines.append(f"        torch.empty({tuple(shape)}, dtype={dtype}, device=DEVICE),")
    lines.append("    ]")
    for launch in kernel.launches:
        arguments = ", ".join(f"{kind}s[{i}]" for kind, i in launch.args)
        options = options_text(
            kernel.source, launch.function, launch.num_warps, launch.max_registers
        )
        lines.append(f"    {launch.function}[{tuple(launch.grid)}]({arguments}, {options})")
    return "\n".join([*lines, ""])


def options_text(source: str, function: str, num_warps: int, max_registers: int | None) -> str:
    """Keywords of a launch: what the function was compiled with."""
    given = {**compiler_options(num_warps, max_registers), **early_start(source, function)}
    return ", ".join(f"{name}={value}" for name, value in given.items())


def aten_text(
    name: str,
    inputs: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    outputs: Sequence[Any],
    *,
    exact: bool,
    owner: Any = None,
    namespace: dict[str, Any] | None = None,
) -> str:
    """`def NAME(...)`: ATen nodes, one a line; in fp64 throughout if exact.

    outputs: nodes, or lists of them. namespace: collects constants by name.
    """
    taken = {*RESERVED, "reference", "fp64", "run", "main", "wide", "load", "judge", "ours"}
    text = Expressions(owner, Namer(taken), {} if namespace is None else namespace)
    lines = ["", "", f"def {name}({', '.join(text.namer[n] for n in inputs)}):"]
    if exact and inputs:
        named = [text.namer[n] for n in inputs]
        lines.append(f"    {', '.join(named)}, = wide([{', '.join(named)}])")
    lines += [f"    {text.namer[node]} = {_call_text(text, node, exact)}" for node in nodes]
    results = ", ".join(text.value(n) for n in outputs)
    return "\n".join([*lines, f"    return [{results}]", ""])


def _call_text(text: Expressions, node: fx.Node, exact: bool) -> str:
    if not exact:
        return text.call(node)
    args, kwargs = widened_call(node, torch.float64)
    return f"wide({text.call(node, args, kwargs)})"
