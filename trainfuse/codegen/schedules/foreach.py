"""The foreach schedule: one launch runs a traced single-tensor update over a whole list of tensors.

The template is torch's own update of one flat parameter. Its 0-d part (bias corrections) is
evaluated once a program; its 1-D part element by element, each tensor read once and written once.

Device tables (int64 unless said), built by foreach_tables.py:

    static    [tensors, len(static_roles) + 1]   addresses that last; the element count is last
    volatile  [tensors, len(volatile_roles)]     addresses that move from call to call (gradients)
    chunks    [programs, 2] int32                tensor index, chunk index within the tensor

`update(static, volatile, chunks, *shared)` runs on one program a chunk. New 0-d values (a step
count) are written by `advance(static, *shared)`, one program a tensor, launched after `update`:
every program of `update` reads the old ones, so writing them there would be a race.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autodiff.graph import Refusal
from autodiff.ops import lookup
from trainfuse.codegen.lower import library_digest
from trainfuse.codegen.scalars import TRITON_TYPE, compute_dtype
from trainfuse.codegen.schedules.foreach_tables import ALIGNMENT_BYTES, BLOCK, CHUNK_SIZES
from trainfuse.codegen.targets import SIMULATED, Target
from trainfuse.codegen.triton_ops import Unsupported, expression
from trainfuse.codegen.triton_printer import HEADER, opening

NUM_WARPS = 4


@dataclass(frozen=True, slots=True)
class ForeachKernel:
    """A generated update of every tensor of one bucket.

    source: module text with the Triton functions `update` and, if `advances`, `advance`.
    static_roles, volatile_roles: columns of the two pointer tables; shared_roles: the 0-d tensors
    passed directly, in order. written: roles that receive new values in place.
    chunk: elements a program of `update` covers. aligned: every table pointer must be a multiple
    of 16 bytes. bytes_per_element: what one element reads and writes.
    """

    key: str
    name: str
    source: str
    static_roles: tuple[str, ...]
    volatile_roles: tuple[str, ...]
    shared_roles: tuple[str, ...]
    written: tuple[str, ...]
    advances: bool
    chunk: int
    num_warps: int
    aligned: bool
    bytes_per_element: int


@dataclass(frozen=True, slots=True)
class _Template:
    """The template, sorted: scalars are 0-d nodes, elements the rest, both in order."""

    inputs: dict[str, fx.Node]
    outputs: dict[str, fx.Node]
    scalars: tuple[fx.Node, ...]
    elements: tuple[fx.Node, ...]


def lower_foreach(
    template: fx.GraphModule,
    roles: Sequence[str],
    written: Sequence[str],
    *,
    shared: Sequence[str] = ("lr",),
    volatile: Sequence[str] = ("grad",),
    dtypes: Mapping[str, torch.dtype] | None = None,
    chunk: int = CHUNK_SIZES[0],
    aligned: bool = True,
    target: Target = SIMULATED,
) -> ForeachKernel | Refusal:
    """Generate the kernel that applies `template` to a list of tensors.

    template: functional ATen; a placeholder for every role, in order, 1-D (per tensor) or 0-d; its
    leading outputs are the new values of `written`, in order.
    chunk: elements a program covers, from `chunk_for`: one of CHUNK_SIZES, or a power of two that
    is held as one block.
    dtypes: storage type of a role where it differs from the template's placeholder.
    Refused, with the node named: an operation that isn't pointwise or has no Triton text.
    """
    sorted_template = _sort(template, roles, written)
    names = {node: role for role, node in sorted_template.inputs.items()}
    storage = {role: _value(node).dtype for role, node in sorted_template.inputs.items()}
    storage.update(dtypes or {})
    bodies = _Bodies(names)
    for node in (*sorted_template.scalars, *sorted_template.elements):
        refusal = bodies.add(node)
        if refusal is not None:
            return refusal
    per_tensor = [role for role in roles if role not in shared]
    static = tuple(role for role in per_tensor if role not in volatile)
    moving = tuple(role for role in per_tensor if role in volatile)
    layout = _Layout(
        sorted_template, storage, static, moving, tuple(shared), chunk, aligned, target
    )
    source = layout.render(bodies)
    flat = [role for role in per_tensor if _value(sorted_template.inputs[role]).dim() > 0]
    traffic = sum(storage[role].itemsize for role in flat)
    traffic += sum(storage[role].itemsize for role in written if role in flat)
    key = hashlib.sha256(repr((source, NUM_WARPS, library_digest())).encode()).hexdigest()
    return ForeachKernel(
        key=key,
        name=f"foreach_update_{key[:8]}",
        source=source,
        static_roles=static,
        volatile_roles=moving,
        shared_roles=tuple(shared),
        written=tuple(written),
        advances=layout.advances,
        chunk=chunk,
        num_warps=NUM_WARPS,
        aligned=aligned,
        bytes_per_element=traffic,
    )


def _sort(template: fx.GraphModule, roles: Sequence[str], written: Sequence[str]) -> _Template:
    placeholders = [node for node in template.graph.nodes if node.op == "placeholder"]
    inputs = dict(zip(roles, placeholders, strict=True))
    results: Any = template.graph.output_node().args[0]
    outputs: dict[str, fx.Node] = dict(zip(written, results[: len(written)], strict=True))
    needed: set[fx.Node] = set()
    stack = list(outputs.values())
    while stack:
        node = stack.pop()
        if node not in needed and node.op == "call_function":
            needed.add(node)
            stack.extend(node.all_input_nodes)
    live = [node for node in template.graph.nodes if node in needed]
    scalars = tuple(node for node in live if _value(node).dim() == 0)
    elements = tuple(node for node in live if _value(node).dim() > 0)
    return _Template(inputs, outputs, scalars, elements)


def _value(node: fx.Node) -> Tensor:
    return node.meta["val"]


class _Bodies:
    """Statement lists for the 0-d and the 1-D part, grown node by node."""

    def __init__(self, names: Mapping[fx.Node, str]) -> None:
        self.names = dict(names)
        self.scalars: dict[str, str] = {}  # name -> statement
        self.reads: dict[str, list[str]] = {}  # 0-d name -> what its statement reads
        self.elements: list[str] = []
        self.crossing: dict[str, None] = {}  # 0-d names that the 1-D part reads, in order

    def add(self, node: fx.Node) -> Refusal | None:
        """Append the statement of one node, or say why it has no text."""
        try:
            text = self._text(node)
        except Unsupported as unsupported:
            return Refusal("codegen", unsupported.reason, f"{node.name}: {node.target}", None)
        sources = [self.names[arg] for arg in node.all_input_nodes if _value(arg).dim() == 0]
        if _value(node).dim() == 0:
            name = f"s{len(self.scalars)}"
            self.scalars[name] = f"{name} = {text}  # {node.target}"
            self.reads[name] = sources
        else:
            name = f"t{len(self.elements)}"
            self.elements.append(f"{name} = {text}  # {node.target}")
            self.crossing.update(dict.fromkeys(sources))
        self.names[node] = name
        return None

    def scalar_statements(self, wanted: Iterable[str]) -> tuple[list[str], set[str]]:
        """The 0-d statements that give `wanted`, and every 0-d name that is then in use."""
        used: set[str] = set()
        pending = list(wanted)
        while pending:
            name = pending.pop()
            if name not in used:
                used.add(name)
                pending.extend(self.reads.get(name, ()))
        return [text for name, text in self.scalars.items() if name in used], used

    def _text(self, node: fx.Node) -> str:
        if lookup(node.target).kind != "creation":
            return expression(node, self.names.__getitem__)
        fill = {"ones_like": 1, "zeros_like": 0}.get(str(node.target).split(".")[1], node.args[-1])
        if not isinstance(fill, bool | int | float):
            raise Unsupported(node, "its constant is no number")
        dtype = compute_dtype(_value(node).dtype)
        return f"tl.full([], {fill!r}, {TRITON_TYPE[dtype]})"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Everything around the two bodies: tables, loads, stores, loops."""

    template: _Template
    storage: Mapping[str, torch.dtype]
    static: tuple[str, ...]
    volatile: tuple[str, ...]
    shared: tuple[str, ...]
    chunk: int
    aligned: bool
    target: Target

    @property
    def flat(self) -> list[str]:
        """Per-tensor roles walked element by element."""
        roles = (*self.static, *self.volatile)
        return [role for role in roles if _value(self.template.inputs[role]).dim() > 0]

    @property
    def own_scalars(self) -> list[str]:
        """Per-tensor 0-d roles (a step count)."""
        roles = (*self.static, *self.volatile)
        return [role for role in roles if _value(self.template.inputs[role]).dim() == 0]

    @property
    def advances(self) -> bool:
        """Whether a 0-d role receives a new value."""
        return any(role in self.template.outputs for role in self.own_scalars)

    def held_in(self, role: str) -> torch.dtype:
        """The type that a loaded value is computed in: the template's."""
        return compute_dtype(_value(self.template.inputs[role]).dtype)

    @property
    def block(self) -> int:
        """Elements a program holds at once: two 16-byte vectors of fp32 a thread on a GPU."""
        return BLOCK if self.chunk in CHUNK_SIZES else self.chunk

    def render(self, bodies: _Bodies) -> str:
        """The module text."""
        passed = list(bodies.crossing)
        parts = [
            '"""Update every tensor of a bucket in one launch; tables as in foreach.py."""',
            "",
            HEADER,
            "",
            *self._block(bodies, passed),
            "",
            "",
            *self._update(bodies, passed),
        ]
        if self.advances:
            parts += ["", "", *self._advance(bodies)]
        return "\n".join(parts) + "\n"

    def _block(self, bodies: _Bodies, passed: list[str]) -> list[str]:
        pointers = [f"{role}_ptr" for role in self.flat]
        arguments = ", ".join([*pointers, "start", "numel", *passed, "FULL: tl.constexpr"])
        lines = ["@triton.jit", f"def update_block({arguments}):"]
        lines += [f"    offsets = tl.arange(0, {self.block})", "    mask = start + offsets < numel"]
        body = [
            [f"{role} = tl.load({role}_ptr + start + offsets{mask})" for role in self.flat]
            for mask in ("", ", mask=mask")
        ]
        lines += ["    if FULL:", *_indent(body[0], 2), "    else:", *_indent(body[1], 2)]
        for role in self.flat:
            wanted = self.held_in(role)
            if wanted is not self.storage[role]:
                lines.append(f"    {role} = {role}.to({TRITON_TYPE[wanted]})")
        lines += _indent(bodies.elements, 1)
        stores = {
            role: f"{bodies.names[node]}.to({TRITON_TYPE[self.storage[role]]})"
            for role, node in self.template.outputs.items()
            if role in self.flat
        }
        body = [
            [f"tl.store({role}_ptr + start + offsets, {new}{mask})" for role, new in stores.items()]
            for mask in ("", ", mask=mask")
        ]
        return [*lines, "    if FULL:", *_indent(body[0], 2), "    else:", *_indent(body[1], 2)]

    def _pointers(self, roles: Collection[str]) -> list[str]:
        """Statements that turn table entries of tensor `index` into pointers."""
        lines = []
        for table, columns in (("static", self.static), ("volatile", self.volatile)):
            width = len(columns) + (table == "static")
            for column, role in enumerate(columns):
                if role not in roles:
                    continue
                address = f"tl.load({table} + index * {width} + {column})"
                pointer = f"{address}.to(tl.pointer_type({TRITON_TYPE[self.storage[role]]}))"
                if self.aligned and role in self.flat:
                    pointer = f"tl.multiple_of({pointer}, {ALIGNMENT_BYTES})"
                lines.append(f"{role}_ptr = {pointer}")
        return lines

    def _scalar_loads(self, used: set[str]) -> list[str]:
        lines = []
        for role in (*self.own_scalars, *self.shared):
            if role not in used:
                continue
            wanted = self.held_in(role)
            cast = "" if wanted is self.storage[role] else f".to({TRITON_TYPE[wanted]})"
            pointer = f"{role}_ptr"
            lines.append(f"{role} = tl.load({pointer}){cast}")
        return lines

    def _update(self, bodies: _Bodies, passed: list[str]) -> list[str]:
        shared = [f"{role}_ptr" for role in self.shared]
        width = len(self.static) + 1
        call = ", ".join([*(f"{role}_ptr" for role in self.flat), "{start}", "numel", *passed])
        statements, used = bodies.scalar_statements(passed)
        lines = [
            "program = tl.program_id(0)",
            "index = tl.load(chunks + 2 * program).to(tl.int64)",
            f"first = tl.load(chunks + 2 * program + 1).to(tl.int64) * {self.chunk}",
            f"numel = tl.load(static + index * {width} + {width - 1})",
            *self._pointers({*self.flat, *used}),
            *self._scalar_loads(used),
            *statements,
            f"stop = tl.minimum(first + {self.chunk}, numel)",
            f"blocks = (stop - first) // {self.block}",
            "for block in range(0, blocks):",
            f"    update_block({call.format(start=f'first + block * {self.block}')}, True)",
            f"tail = first + blocks * {self.block}",
            "if tail < stop:",
            f"    update_block({call.format(start='tail')}, False)",
        ]
        parameters = ["static", "volatile", "chunks", *shared]
        doc = "One chunk of one tensor."
        return [*opening("update", parameters, doc, self.target), *_indent(lines, 1)]

    def _advance(self, bodies: _Bodies) -> list[str]:
        """The launch that writes the new 0-d values, from the 0-d part alone."""
        shared = [f"{role}_ptr" for role in self.shared]
        new = {
            role: f"{bodies.names[node]}.to({TRITON_TYPE[self.storage[role]]})"
            for role, node in self.template.outputs.items()
            if role in self.own_scalars
        }
        stores = [f"tl.store({role}_ptr, {text})" for role, text in new.items()]
        statements, used = bodies.scalar_statements(
            bodies.names[self.template.outputs[role]] for role in new
        )
        used.update(new)
        lines = [
            "index = tl.program_id(0).to(tl.int64)",
            *self._pointers(used),
            *self._scalar_loads(used),
            *statements,
            *stores,
        ]
        doc = "The new 0-d values of one tensor."
        return [*opening("advance", ["static", *shared], doc, self.target), *_indent(lines, 1)]


def _indent(lines: Sequence[str], levels: int) -> list[str]:
    return ["    " * levels + line for line in lines]
