"""The checklists of what must hold, and which test proves each row.

A test names its rows with `@pytest.mark.covers("A13", "B views")`; `python -m tests.checklists`
prints the table; `test_checklists.py` fails where a row has no test, or a test an unknown row.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

TESTS = Path(__file__).parent

SLICING: Mapping[str, str] = {
    "A1": "chain o-o: one subgraph",
    "A2": "o beside X: one, X untouched outside",
    "A3": "unrelated pair; pair sharing an input: two each",
    "A4": "diamond: one",
    "A5": "two splits added crosswise: one",
    "A6": "o-X-o plus o-o: two, no cycle",
    "A7": "independent X in the way: merge up",
    "A8": "independent X in the way: merge down",
    "A9": "branch that rebinds a value used later: nothing merged across",
    "A10": "write through one of two views: order, values, gradients kept",
    "A11": "aliased outputs: gradients, strides, aliasing as eager",
    "A12": "only views returned: none",
    "A13": "one, two sigmoids, inlining on: none, one",
    "A14": "linear, bias attribute or none: outputs, gradients as eager",
    "A15": "linear, computed bias: outputs, gradients as eager",
    "A16": "linear, bias None, then tensor: outputs, gradients as eager",
    "A17": "tensor list in and out: requires_grad per element",
    "A18": "grad and no-grad chains across a flag, 3 runs: as eager",
    "A19": "frozen bias: backward returns one gradient",
    "A20": "no-grad value beyond a barrier: output flag False",
    "A21": "no cotangent into cat of a list: None or zeros, no error",
    "A22": "flags, 4 runs: one trainable of three",
    "A23": "flags, 4 runs: value used by two outside ops",
    "A24": "flags, 4 runs: X between",
    "A25": "flags, 4 runs: inner no_grad",
    "A26": "LSTM cell: one; no mm, sigmoid, tanh, mul left",
    "A27": "every row of the operator table: output, gradient as eager",
    "A28": "a*b*a+b: right captures, cotangent slots; two accumulations",
    "A29": "one trainable input; output also used inside: both cotangents summed",
    "A30": "linear, frozen input: one matmul in backward",
}

FUSION: Mapping[str, str] = {
    "B dtypes": "every dtype; promotion over 0-dim, scalar, n-dim; literals; fp64 gradcheck",
    "B pointwise": "unary, binary, ternary, bitwise, compare, where, clamp, gelus, type_as",
    "B casts": "all pairs, same type, to bool, dtype None",
    "B extremal": "inf, -inf, nan; amax, amin; one-sided and reversed clamp",
    "B broadcast": "either side, any rank, size 1, expanded input, one tensor two ways",
    "B broadcast gradient": "summed to each operand's shape; expand outputs keep stride 0",
    "B sum_to_size": "no-op, reducing; new sizes",
    "B layout": "all permutation pairs; channels-last with any broadcast dim",
    "B odd layouts": "overlapping strides; permute, transpose, t; rank 9",
    "B views": "view, reshape, flatten, squeeze, unsqueeze; nested; before permute; random",
    "B views, more": "around matmul; sizes returned as ints; base mutated after the view",
    "B reduction": "every axis set, keepdim, all, size-1, 0-dim, integer; each kind",
    "B reduction, more": "pointwise before, after; both returned; varying axis; dead result",
    "B norms": "layer norm; batch norm: train x tracked x affine, awkward sizes, statistics",
    "B softmax": "dtype argument, log_softmax, chained with norms, chunk between",
    "B scalars, devices": "0-dim tensors, CPU scalars, second device, no tensor input",
    "B dropout": "rates; eval; flag flips; forward mask is backward mask",
    "B CUDA graph": "replays draw new masks, same sequence as ungraphed",
    "B autocast": "both phases fused; gradient dtype is the input's; mixed dtypes accumulate",
    "B GEMM, conv": "bias split on, off, by rank; computed bias; changing shapes",
    "B gather": "index_select, gather: 0-dim, int32, run-time dim, scatter backward",
    "B in-place": "pure chains, inputs, loops: eager's result",
    "B guards": "three shapes, two ranks; no_grad, then grad; each branch; early graph_for",
    "B outputs": "an input passed through; random topologies",
    "B switches": "single node; siblings; skip, unskip; strict; no GPU: clear error",
    "B switches, more": "comparison, nested contexts; setters return the old value",
    "B op_db": "every op, dtype, sample: exact layout; extremal samples",
}

SEMANTICS: Mapping[str, str] = {
    "S broadcast": "broadcast gradients and sum_to_size",
    "S views": "aliasing, views, in-place through views, base mutated after the view",
    "S tied": "tied, unused and frozen parameters",
    "S losses": "several losses and backwards in one step",
    "S detach": "partial detach, no_grad values",
    "S lists": "lists with missing gradients: None cotangents",
    "S custom Function": "the user's backward is law",
    "S checkpoint": "reentrant or not, dropout, nested, selective policies",
    "S modes": "no_grad, inference_mode, train and eval in turn",
    "S flips": "requires_grad flips",
    "S retain": "retain_graph and two backwards",
    "S second order": "gradients of gradients",
    "S hooks": "forward, pre-forward, tensor, module backward, parameter, post-accumulate hooks",
    "S scaler": "GradScaler: scale, unscale, clip, step, update, one inf",
}

PAINS: Mapping[str, str] = {
    "G1": "bilinear, crop, conv, max-pool, where",
    "G2": "in-place inside a custom Function",
    "G3": "user's backward dropped; under func.grad",
    "G4": "linear to cross-entropy, ignored rows",
    "G5": "losses over ragged batches; summed gradients",
    "G6": "bf16 weight gradient of a head in chunks",
    "G7": "buffers reused while needed",
    "G8": "tied head and embedding, each frozen in turn",
    "G9": "fp16 logits' gradient underflows",
    "G10": "subgradients at kinks",
    "G11": "norm statistics of large means and half rows",
    "G12": "no_grad and detached outputs require no gradient",
    "G13": "value used inside and returned",
    "G14": "neighbours share a mask",
    "G15": "memory budget re-draws dropout",
    "G16": "a mode exact to eager's masks",
    "G17": "checkpoint re-draws",
    "G18": "two random calls merged by CSE",
    "G19": "scaler check",
    "G20": "double backward",
    "G21": "retain_graph after a plain backward",
    "C1": "hooks added after the first call",
    "C2": "un-frozen layer trains",
    "C3": "eval() after the train plan",
    "C4": "a Python step counter in the maths",
    "C5": "schedulers: one plan",
    "C6": "dynamic padding",
    "C7": "multi-scale inputs within a budget of plans",
    "C8": "an RNN stays opaque, its surroundings fuse",
    "C9": "forward and backward compiled inside DDP",
    "D1": "unknown operators stay inside one graph",
    "D2": "saved bytes at most the stock minimum cut's",
    "T1": "200 steps beside eager",
    "T2": "first bad step in eager",
    "T6": "a failing kernel is tried once",
    "U1": "one pool for all shapes",
    "U2": "accumulation in the graph",
    "U3": "a second micro-step adds",
    "U4": "replays draw new masks",
    "U5": "kept losses keep their values",
    "L2": "EMA by name; swap seen at the next call",
    "L6": "logging keeps one graph",
    "L8": "checkpoint keys as without us",
    "L10": "modules pickle after a fit",
}

ROWS: Mapping[str, str] = {**SLICING, **FUSION, **SEMANTICS, **PAINS}


def covered() -> dict[str, list[str]]:
    """Row -> the tests that name it, as "file.py::function"."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for row, function in _marks(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(row, []).append(f"{path.relative_to(TESTS)}::{function}")
    return found


def _marks(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(row, test) of every `covers` mark: a decorator's, or one of a parameter's."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        for decorator in node.decorator_list:
            for call in ast.walk(decorator):
                if isinstance(call, ast.Call) and _is_covers(call.func):
                    for argument in call.args:
                        assert isinstance(argument, ast.Constant), "rows are written out"
                        yield str(argument.value), node.name


def _is_covers(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == "covers"


def table() -> str:
    """The rows, their intent and their tests."""
    tests = covered()
    lines = [
        f"{row}: {intent}\n    " + "\n    ".join(tests.get(row, ["none"]))
        for row, intent in ROWS.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
