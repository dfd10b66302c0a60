"""Stand-alone scripts for what is more than one group: an optimizer's update, and a whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autodiff import ops
from trainfuse.runtime.emit import device_text
from trainfuse.runtime.repro import aten_text, head, kernel_text, launch_text, options_text, write
from trainfuse.runtime.room import device_of

if TYPE_CHECKING:
    from autodiff.graph import TrainingGraph
    from trainfuse.capture.update_templates import UpdateTemplate
    from trainfuse.codegen.schedules.foreach import ForeachKernel
    from trainfuse.runtime.calls import GroupCall
    from trainfuse.runtime.program import Program

_UPDATE = """

def run(entries):
    from foreach_tables import chunk_table, pointer_table

    static = pointer_table(entries, {static}, counted=True).to(DEVICE)
    moving = pointer_table(entries, {volatile}, counted=False).to(DEVICE)
    chunks = chunk_table([e["param"].numel() for e in entries], {chunk}).to(DEVICE)
    shared = [entries[0][role] for role in {shared}]
    update[(len(chunks),)](static, moving, chunks, *shared, {options})
    if {advances}:
        advance[(len(entries),)](static, *shared, {options})
    return [e[role] for e in entries for role in WRITTEN]


def flat(entry):
    return [entry[role].reshape(-1) if entry[role].dim() else entry[role] for role in ROLES]


def by_aten(function, entries):
    made = [function(*flat(e)) for e in entries]
    shapes = [e[role].shape for e in entries for role in WRITTEN]
    return [t.reshape(s) for t, s in zip([t for many in made for t in many], shapes)]


def main():
    entries = load()
    names = [f"{{role}} of tensor {{i}}" for i in range(len(entries)) for role in WRITTEN]
    judge(names, run(load()), by_aten(reference, entries), by_aten(fp64, entries))


if __name__ == "__main__":
    main()
"""

_STEP = """

def seeded(function, *args):
    torch.set_rng_state(load()["generators"][0])
    for device, state in enumerate(load()["generators"][1:]):
        torch.cuda.set_rng_state(state.cpu(), device)
    return function(*args)


def run():
    inputs = load()["inputs"]
    given = list(inputs)
    outputs = step(given)
    return [*(g for grads in recorded for g in grads), *outputs, *(inputs[i] for i in WRITTEN)]


def main():
    native, exact = seeded(reference, *load()["inputs"]), seeded(fp64, *load()["inputs"])
    judge(NAMES, seeded(run), native, exact)


if __name__ == "__main__":
    main()
"""


def write_update_repro(
    folder: Path | None,
    name: str,
    kernel: ForeachKernel,
    template: UpdateTemplate,
    entries: Sequence[Mapping[str, Tensor]],
    problem: str,
) -> str:
    """Write a script that runs an update kernel and torch's traced update on some parameters.

    entries: role -> tensor of each, from before the update. Returns the script's path.
    """
    graph = template.gm.graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    results: Any = graph.output_node().args[0]
    placeholders = graph.find_nodes(op="placeholder")
    outputs = results[: len(template.written)]
    parts = [head(name, problem, entries[0]["param"].device), kernel_text(kernel.source)]
    parts += [
        aten_text(name, placeholders, nodes, outputs, exact=exact)
        for name, exact in (("reference", False), ("fp64", True))
    ]
    parts.append(f"\n\nROLES, WRITTEN = {template.roles!r}, {template.written!r}\n")
    parts.append(
        _UPDATE.format(
            static=kernel.static_roles,
            volatile=kernel.volatile_roles,
            shared=kernel.shared_roles,
            chunk=kernel.chunk,
            options=options_text(kernel.source, "update", kernel.num_warps, None),
            advances=kernel.advances,
        )
    )
    saved = [dict(entry) for entry in entries]
    return write(folder, f"{name}-{kernel.key[:12]}", "".join(parts), saved)


def write_step_repro(
    folder: Path | None,
    captured: TrainingGraph,
    program: Program,
    params: Sequence[Sequence[str]],
    args: Sequence[Any],
    problem: str,
) -> str:
    """Write a script that runs a whole program, kernels included, and the captured graph by ATen.

    captured: with the program's dropout masks. params: names of every update's parameters. args:
    the program's inputs, from before the step; the generators are as they are now. Phases that
    Inductor compiled run as ATen.
    """
    constants: dict[str, Any] = {}
    parts = [head("the step", problem, device_of(args))]
    parts += [
        _reference_text(name, captured, constants, exact=exact)
        for name, exact in (("reference", False), ("fp64", True))
    ]
    parts += [
        f"\n\ndef {name}(*inputs, out):\n    import {name}_kernel\n\n"
        f"    {name}_kernel.run(inputs, out)\n"
        for name in program.groups
    ]
    parts += [
        aten_text(name, call.segment.inputs, call.segment.nodes, call.segment.outputs, exact=False)
        for name, call in program.segments.items()
    ]
    updates = "".join(
        f"\n\ndef {name}(params, grads):\n    recorded.append([g.clone() for g in grads])\n"
        for name in program.updates
    )
    parts += [f"\n\nrecorded = []\n{updates}\n\n", program.source]
    own = {n: v for n, v in program.namespace.items() if isinstance(v, Tensor)}
    constants.update(own)
    parts += [f"\n\n{name} = load()['constants'][{name!r}]\n" for name in constants]
    inputs = [fact.name for fact in captured.inputs]
    written = [inputs.index(name) for name in captured.mutations]
    names = [f"gradient of {name}" for names in params for name in names]
    names += [f"output {i}" for i in range(captured.num_outputs)]
    names += [f"new {name}" for name in captured.mutations]
    parts.append(f"\n\nNAMES, WRITTEN = {names!r}, {written!r}\n{_STEP}")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    generators = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]
    saved = {"inputs": list(args), "constants": constants, "generators": generators}
    device = device_of(args)
    modules = {f"{n}_kernel": _module_text(call, device) for n, call in program.groups.items()}
    return write(folder, "step", "".join(parts), saved, modules)


def _reference_text(
    name: str, captured: TrainingGraph, constants: dict[str, Any], *, exact: bool
) -> str:
    """The captured graph: gradients of every update, outputs, new values."""
    nodes = captured.nodes()
    updates = [n for n in nodes if ops.lookup(n.target).kind == "effect"]
    gradients: list[Any] = [g for update in updates for g in update.args[1]]  # type: ignore[union-attr]  # by the operator's schema
    namespace: dict[str, Any] = {}
    text = aten_text(
        name,
        captured.graph.find_nodes(op="placeholder"),
        [n for n in nodes if n not in updates],
        [*gradients, *captured.output_nodes],
        exact=exact,
        owner=captured.gm,
        namespace=namespace,
    )
    constants.update({n: v for n, v in namespace.items() if isinstance(v, Tensor)})
    return text


def _module_text(call: GroupCall, device: torch.device) -> str:
    """A module with one group's kernels and `run(inputs, outputs)`."""
    top = f"import torch\n\nDEVICE = {device_text(device)}\n\n\n"
    return top + kernel_text(call.kernel.source) + launch_text(call.kernel)
