"""A stand-alone script that shows one kernel's fault: its text, the ATen nodes, the inputs."""

from __future__ import annotations

import platform
import re
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainfuse.runtime.emit import RESERVED, Expressions, Namer

if TYPE_CHECKING:
    from trainfuse.codegen.ir import GroupKernel
    from trainfuse.fusion.plan import FusionGroup

_CODEGEN = Path(__file__).parent.parent / "codegen"
_LIBRARIES = (_CODEGEN / "triton_lib.py", _CODEGEN / "interpreted.py")
_MAIN = """

def main():
    inputs = torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)
    expected = reference(*[t.clone() for t in inputs])
    ours = run(inputs)
    for i, (mine, eager) in enumerate(zip(ours, expected)):
        error = (mine.double() - eager.double()).abs().max().item() if mine.numel() else 0.0
        print(f"output {i}: {tuple(mine.shape)} {mine.dtype}, largest difference {error:.3g}")


if __name__ == "__main__":
    main()
"""


def write_repro(
    folder: Path | None,
    group: FusionGroup,
    kernel: GroupKernel,
    inputs: Sequence[Tensor],
    problem: str,
) -> str:
    """Write `NAME-KEY.py`, and beside it the inputs and the functions that kernels call.

    folder: None for a fresh temporary one. Returns the script's path. It needs torch, Triton and a
    device like this one (or TRITON_INTERPRET=1), not trainfuse.
    """
    place = Path(tempfile.mkdtemp(prefix="trainfuse-repro-")) if folder is None else folder
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{group.name}-{kernel.key[:12]}.py"
    torch.save([t.detach().clone() for t in inputs], path.with_suffix(".pt"))
    path.write_text(repro_text(group, kernel, problem))
    for library in _LIBRARIES:
        (place / library.name).write_text(_stand_alone(library.read_text()))
    return str(path)


def repro_text(group: FusionGroup, kernel: GroupKernel, problem: str) -> str:
    """The script: kernel module, `run` (our launches), `reference` (ATen), and a comparison."""
    head = (
        f"# {group.name}: {' '.join(problem.split())}\n"
        f"# torch {torch.__version__}, triton {version('triton')}, Python"
        f" {platform.python_version()}\n"
    )
    source = re.sub(r"^from __future__ import .*\n", "", _stand_alone(kernel.source), flags=re.M)
    parts = [head, "from pathlib import Path\n\nimport torch\n\naten = torch.ops.aten\n"]
    parts += ["prims = torch.ops.prims\ninf, nan = float('inf'), float('nan')\n\n", source]
    parts += [_run_text(group, kernel), reference_text(group), _MAIN]
    return "".join(parts)


def _stand_alone(source: str) -> str:
    """The text with its imports of trainfuse.codegen turned to the copies beside it."""
    source = re.sub(r"^( *)from trainfuse\.codegen import", r"\1import", source, flags=re.M)
    return re.sub(r"^( *)from trainfuse\.codegen\.", r"\1from ", source, flags=re.M)


def _run_text(group: FusionGroup, kernel: GroupKernel) -> str:
    lines = ["", "", "def run(inputs):", "    device = inputs[0].device", "    outputs = ["]
    for node in group.outputs:
        v = node.meta["val"]
        layout = f"{tuple(v.shape)}, {tuple(v.stride())}, dtype={v.dtype}, device=device"
        lines.append(f"        torch.empty_strided({layout}),")
    lines += ["    ]", "    workspaces = ["]
    for shape, dtype in kernel.workspaces:
        lines.append(f"        torch.empty({tuple(shape)}, dtype={dtype}, device=device),")
    lines.append("    ]")
    for launch in kernel.launches:
        arguments = ", ".join(f"{kind}s[{i}]" for kind, i in launch.args)
        options = f"num_warps={launch.num_warps}, num_stages={launch.num_stages}"
        lines.append(f"    {launch.function}[{tuple(launch.grid)}]({arguments}, {options})")
    return "\n".join([*lines, "    return outputs", ""])


def reference_text(group: FusionGroup) -> str:
    """`def reference(...)`: the group's ATen nodes, one a line."""
    namespace: dict[str, Any] = {}
    text = Expressions(None, Namer(set(RESERVED | {"reference", "run", "main"})), namespace)
    arguments = ", ".join(text.namer[n] for n in group.inputs)
    lines = ["", "", f"def reference({arguments}):"]
    lines += [f"    {text.namer[n]} = {text.call(n)}" for n in group.nodes]
    results = ", ".join(text.namer[n] for n in group.outputs)
    return "\n".join([*lines, f"    return [{results}]", ""])
