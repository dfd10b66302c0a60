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
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autodiff.graph import Refusal
from trainfuse.codegen.schedules.foreach_tables import ALIGNMENT_BYTES, CHUNK_SIZES

BLOCK = 1024
NUM_WARPS = 4

_TRITON_TYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.bool: "tl.int1",
}


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
) -> ForeachKernel | Refusal:
    """Generate the kernel that applies `template` to a list of tensors.

    template: functional ATen; a placeholder for every role, in order, 1-D (per tensor) or 0-d; its
    leading outputs are the new values of `written`, in order.
    dtypes: storage type of a role where it differs from the template's placeholder.
    Refused, with the node named: an operation that isn't pointwise or has no Triton text.
    """
    sorted_template = _sort(template, roles, written)
    names = {node: role for role, node in sorted_template.inputs.items()}
    storage = {role: _value(node).dtype for role, node in sorted_template.inputs.items()}
    storage.update(dtypes or {})
    bodies = _Bodies(names, storage)
    for node in (*sorted_template.scalars, *sorted_template.elements):
        refusal = bodies.add(node)
        if refusal is not None:
            return refusal
    per_tensor = [role for role in roles if role not in shared]
    static = tuple(role for role in per_tensor if role not in volatile)
    moving = tuple(role for role in per_tensor if role in volatile)
    layout = _Layout(sorted_template, storage, static, moving, tuple(shared), chunk, aligned)
    source = layout.render(bodies)
    flat = [role for role in per_tensor if _value(sorted_template.inputs[role]).dim() > 0]
    traffic = sum(storage[role].itemsize for role in flat)
    traffic += sum(storage[role].itemsize for role in written if role in flat)
    key = hashlib.sha256(f"{source}\n# warps {NUM_WARPS}".encode()).hexdigest()
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
    results = template.graph.output_node().args[0]
    outputs = dict(zip(written, results[: len(written)], strict=True))  # type: ignore[index]  # tuple
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


def _compute_type(dtype: torch.dtype) -> torch.dtype:
    """Arithmetic type: low precision is computed in fp32 and rounded only when stored."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _Bodies:
    """Statement lists for the 0-d and the 1-D part, grown node by node."""

    def __init__(self, names: Mapping[fx.Node, str], storage: Mapping[str, torch.dtype]) -> None:
        self.names = dict(names)
        self.types = {node: _compute_type(storage[role]) for node, role in names.items()}
        self.scalars: list[str] = []
        self.elements: list[str] = []
        self.crossing: dict[str, None] = {}  # 0-d names that the 1-D part reads, in order

    def add(self, node: fx.Node) -> Refusal | None:
        """Append the statement of one node, or say why it has no text."""
        result = _compute_type(_value(node).dtype)
        operand_type = self._operand_type(node) if result is torch.bool else result
        text = _expression(
            node,
            lambda value: self._operand(value, operand_type),
            lambda value: self.names[value],  # type: ignore[index]  # only asked of nodes
        )
        if text is None:
            reason = f"{node.target} has no text in the foreach schedule"
            return Refusal("codegen", reason, f"{node.name}: {node.target}", None)
        scalar = _value(node).dim() == 0
        if not scalar:
            crossing = (arg for arg in node.all_input_nodes if _value(arg).dim() == 0)
            self.crossing.update((self.names[arg], None) for arg in crossing)
        body = self.scalars if scalar else self.elements
        name = f"s{len(body)}" if scalar else f"t{len(body)}"
        body.append(f"{name} = {text}  # {node.target}")
        self.names[node] = name
        self.types[node] = result
        return None

    def _operand(self, value: object, wanted: torch.dtype) -> str:
        if not isinstance(value, fx.Node):
            return _literal(value)
        name = self.names[value]
        if self.types[value] is wanted or wanted is torch.bool:
            return name
        return f"{name}.to({_TRITON_TYPES[wanted]})"

    def _operand_type(self, node: fx.Node) -> torch.dtype:
        """The type a comparison is made in: a 0-d operand doesn't widen a 1-D one, as in ATen."""
        operands = node.all_input_nodes
        ranked = [arg for arg in operands if _value(arg).dim() > 0] or operands
        wanted = self.types[ranked[0]]
        for arg in ranked[1:]:
            wanted = torch.promote_types(wanted, self.types[arg])
        return wanted


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

    def render(self, bodies: _Bodies) -> str:
        """The module text."""
        passed = list(bodies.crossing)
        parts = [
            '"""Update every tensor of a bucket in one launch; tables as in foreach.py."""',
            "",
            "import triton",
            "import triton.language as tl",
            "",
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
        lines += [f"    offsets = tl.arange(0, {BLOCK})", "    mask = start + offsets < numel"]
        body = [
            [f"{role} = tl.load({role}_ptr + start + offsets{mask})" for role in self.flat]
            for mask in ("", ", mask=mask")
        ]
        lines += ["    if FULL:", *_indent(body[0], 2), "    else:", *_indent(body[1], 2)]
        for role in self.flat:
            wanted = _compute_type(self.storage[role])
            if wanted is not self.storage[role]:
                lines.append(f"    {role} = {role}.to({_TRITON_TYPES[wanted]})")
        lines += _indent(bodies.elements, 1)
        stores = {
            role: f"{bodies.names[node]}.to({_TRITON_TYPES[self.storage[role]]})"
            for role, node in self.template.outputs.items()
            if role in self.flat
        }
        body = [
            [f"tl.store({role}_ptr + start + offsets, {new}{mask})" for role, new in stores.items()]
            for mask in ("", ", mask=mask")
        ]
        return [*lines, "    if FULL:", *_indent(body[0], 2), "    else:", *_indent(body[1], 2)]

    def _pointers(self, roles: Sequence[str]) -> list[str]:
        """Statements that turn table entries of tensor `index` into pointers."""
        lines = []
        for table, columns in (("static", self.static), ("volatile", self.volatile)):
            width = len(columns) + (table == "static")
            for column, role in enumerate(columns):
                if role not in roles:
                    continue
                address = f"tl.load({table} + index * {width} + {column})"
                pointer = f"{address}.to(tl.pointer_type({_TRITON_TYPES[self.storage[role]]}))"
                if self.aligned and role in self.flat:
                    pointer = f"tl.multiple_of({pointer}, {ALIGNMENT_BYTES})"
                lines.append(f"{role}_ptr = {pointer}")
        return lines

    def _scalar_loads(self) -> list[str]:
        lines = []
        for role in (*self.own_scalars, *self.shared):
            wanted = _compute_type(self.storage[role])
            cast = "" if wanted is self.storage[role] else f".to({_TRITON_TYPES[wanted]})"
            pointer = f"{role}_ptr"
            lines.append(f"{role} = tl.load({pointer}){cast}")
        return lines

    def _update(self, bodies: _Bodies, passed: list[str]) -> list[str]:
        shared = [f"{role}_ptr" for role in self.shared]
        width = len(self.static) + 1
        call = ", ".join([*(f"{role}_ptr" for role in self.flat), "{start}", "numel", *passed])
        lines = [
            "program = tl.program_id(0)",
            "index = tl.load(chunks + 2 * program).to(tl.int64)",
            f"first = tl.load(chunks + 2 * program + 1).to(tl.int64) * {self.chunk}",
            f"numel = tl.load(static + index * {width} + {width - 1})",
            *self._pointers((*self.static, *self.volatile)),
            *self._scalar_loads(),
            *bodies.scalars,
            f"stop = tl.minimum(first + {self.chunk}, numel)",
            f"blocks = (stop - first) // {BLOCK}",
            "for block in range(0, blocks):",
            f"    update_block({call.format(start=f'first + block * {BLOCK}')}, True)",
            f"tail = first + blocks * {BLOCK}",
            "if tail < stop:",
            f"    update_block({call.format(start='tail')}, False)",
        ]
        arguments = ", ".join(["static", "volatile", "chunks", *shared])
        return ["@triton.jit", f"def update({arguments}):", *_indent(lines, 1)]

    def _advance(self, bodies: _Bodies) -> list[str]:
        """The launch that writes the new 0-d values, from the 0-d part alone."""
        shared = [f"{role}_ptr" for role in self.shared]
        stores = [
            f"tl.store({role}_ptr, {bodies.names[node]}.to({_TRITON_TYPES[self.storage[role]]}))"
            for role, node in self.template.outputs.items()
            if role in self.own_scalars
        ]
        lines = [
            "index = tl.program_id(0).to(tl.int64)",
            *self._pointers(self.own_scalars),
            *self._scalar_loads(),
            *bodies.scalars,
            *stores,
        ]
        arguments = ", ".join(["static", *shared])
        return ["@triton.jit", f"def advance({arguments}):", *_indent(lines, 1)]


def _indent(lines: Sequence[str], levels: int) -> list[str]:
    return ["    " * levels + line for line in lines]


# Text of an operation, {0} {1} .. its operands. Where rounding matters it is torch's own order.
_TEXT: Mapping[str, str] = {
    "aten.abs.default": "tl.abs({0})",
    "aten.add.Tensor": "{0} + {1}",
    "aten._to_copy.default": "{0}",
    "aten.clone.default": "{0}",
    "aten.copy.default": "{1}",
    "aten.ones_like.default": "1.0",
    "aten.sign.default": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
    "aten.div.Tensor": "{0} / {1}",
    "aten.eq.Scalar": "{0} == {1}",
    "aten.ge.Scalar": "{0} >= {1}",
    "aten.gt.Scalar": "{0} > {1}",
    "aten.le.Scalar": "{0} <= {1}",
    "aten.lt.Scalar": "{0} < {1}",
    "aten.maximum.default": "tl.maximum({0}, {1}, tl.PropagateNan.ALL)",
    "aten.minimum.default": "tl.minimum({0}, {1}, tl.PropagateNan.ALL)",
    "aten.mul.Tensor": "{0} * {1}",
    "aten.neg.default": "-{0}",
    "aten.ne.Scalar": "{0} != {1}",
    "aten.reciprocal.default": "1.0 / {0}",
    "aten.rsqrt.default": "tl.rsqrt({0})",
    "aten.sqrt.default": "tl.sqrt({0})",
    "aten.square.default": "{0} * {0}",
    "aten.sub.Tensor": "{0} - {1}",
    "aten.where.self": "tl.where({0}, {1}, {2})",
}


def _literal(value: object) -> str:
    """A Python number as Triton text."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    return repr(value)


def _expression(
    node: fx.Node, operand: Callable[[object], str], raw: Callable[[object], str]
) -> str | None:
    """Triton text of one node, or None where there is none.

    operand: text of an argument in the node's arithmetic type; raw: in its own.
    """
    arguments, options = list(node.args), dict(node.kwargs)
    match str(node.target):
        case "aten.add.Tensor" | "aten.sub.Tensor" if options.get("alpha", 1) != 1:
            sign = "+" if "add" in str(node.target) else "-"
            left, right = operand(arguments[0]), operand(arguments[1])
            return f"{left} {sign} {_literal(options['alpha'])} * {right}"
        case "aten.rsub.Scalar":
            return f"{operand(arguments[1])} - {operand(arguments[0])}"
        case "aten.addcmul.default" | "aten.addcdiv.default":
            first, left, right = (operand(argument) for argument in arguments[:3])
            scale = _literal(options.get("value", 1))
            if "addcmul" in str(node.target):
                return f"{first} + {scale} * {left} * {right}"
            return f"{first} + {scale} * ({left} / {right})"
        case "aten.lerp.Scalar":
            start, end, weight = operand(arguments[0]), operand(arguments[1]), arguments[2]
            if abs(weight) < 0.5:  # type: ignore[arg-type]  # a number, by the schema
                return f"{start} + {_literal(weight)} * ({end} - {start})"
            return f"{end} - ({end} - {start}) * {_literal(1 - weight)}"  # type: ignore[operator]
        case "aten.pow.Scalar" if isinstance(arguments[0], float) and arguments[0] > 0:
            # In fp64: next to base 1 a fp32 logarithm would lose the bias correction's digits.
            power = f"({operand(arguments[1])}).to(tl.float64) * {math.log2(arguments[0])!r}"
            return f"tl.exp2({power}).to({_TRITON_TYPES[_compute_type(_value(node).dtype)]})"
        case "aten.pow.Tensor_Scalar" if arguments[1] in (0.5, 2):
            base = operand(arguments[0])
            return f"tl.sqrt({base})" if arguments[1] == 0.5 else f"{base} * {base}"
        case "aten.pow.Tensor_Scalar" if _value(node).dim() == 0:
            power = f"tl.log2({operand(arguments[0])}.to(tl.float64)) * {arguments[1]!r}"
            return f"tl.exp2({power}).to({_TRITON_TYPES[_compute_type(_value(node).dtype)]})"
        case "aten.where.self":
            branches = operand(arguments[1]), operand(arguments[2])
            return f"tl.where({raw(arguments[0])}, {branches[0]}, {branches[1]})"
        case "aten.scalar_tensor.default" | "aten.full.default" | "aten.full_like.default":
            return _literal(arguments[-1])
        case "aten.clamp.default":
            text = operand(arguments[0])
            for bound, function in zip(arguments[1:], ("maximum", "minimum"), strict=False):
                if bound is not None:
                    text = f"tl.{function}({text}, {_literal(bound)}, tl.PropagateNan.ALL)"
            return text
    pattern = _TEXT.get(str(node.target))
    return None if pattern is None else pattern.format(*(operand(value) for value in arguments))
