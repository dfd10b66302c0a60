"""The foreach schedule against torch's own optimizers."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autodiff.graph import Refusal
from trainfuse.codegen.schedules.foreach import ForeachKernel, lower_foreach
from trainfuse.codegen.schedules.foreach_tables import (
    all_aligned,
    chunk_for,
    chunk_table,
    pointer_table,
    walk_together,
)

LR = 3e-3
# 1: a single element; 1000: tail only; 1024: exactly a block; 5000: chunks, blocks and a tail.
SIZES = (1, 1000, 1024, 5000)


def single_step(optimizer: torch.optim.Optimizer) -> None:
    """One undecorated step, as a compiler would see it (no profiling, no graph break)."""
    with torch.no_grad(), mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        type(optimizer).step.__wrapped__(optimizer)


def make(kind: type[torch.optim.Optimizer], params: list[Tensor], **options: Any) -> Any:
    """A single-tensor, capturable optimizer whose lr is a device scalar."""
    if "capturable" in inspect.signature(kind).parameters:
        options["capturable"] = True
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=LR, foreach=False, **options)
    optimizer.param_groups[0]["params"] = params
    optimizer.param_groups[0]["lr"] = torch.tensor(LR, dtype=torch.float64)
    return optimizer


def state_of(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    return {k: v for k, v in optimizer.state[param].items() if isinstance(v, Tensor)}


def trace(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[fx.GraphModule, list[str], list[str]]:
    """The functional template, its roles, and the roles it writes."""
    param = torch.ones(8, dtype=dtype)
    param.grad = torch.ones(8, dtype=dtype)
    seen = make(kind, [param], **options)
    single_step(seen)
    state = state_of(seen, param)
    roles = ["param", "grad", *state, "lr"]

    def update(param: Tensor, grad: Tensor, *rest: Tensor) -> list[Tensor]:
        optimizer = make(kind, [param], **options)
        optimizer.param_groups[0]["lr"] = rest[-1]
        param.grad = grad
        values = dict(zip(state, rest, strict=False))
        optimizer.state[param] = {**seen.state[next(iter(seen.state))], **values}
        single_step(optimizer)
        return [param, *(optimizer.state[param][role] for role in state)]

    example = [torch.ones(8, dtype=dtype), torch.ones(8, dtype=dtype)]
    example += [value.clone() for value in state.values()]
    example.append(torch.tensor(LR, dtype=torch.float64))
    template = make_fx(torch.func.functionalize(update))(*example)
    for node in list(template.graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            template.graph.erase_node(node)
    template.graph.eliminate_dead_code()
    template.recompile()
    return template, roles, ["param", *state]


def load(kernel: ForeachKernel, folder: Path) -> ModuleType:
    """Import the generated text; Triton reads its source from the file."""
    path = folder / f"{kernel.name}.py"
    path.write_text(kernel.source)
    spec = importlib.util.spec_from_file_location(kernel.name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(kernel: ForeachKernel, module: ModuleType, entries: list[dict[str, Tensor]]) -> None:
    """What the runtime does, in the interpreter."""
    static = pointer_table(entries, kernel.static_roles, counted=True)
    volatile = pointer_table(entries, kernel.volatile_roles, counted=False)
    chunks = chunk_table([entry["param"].numel() for entry in entries], kernel.chunk)
    shared = [entries[0][role] for role in kernel.shared_roles]
    module.update[(len(chunks),)](static, volatile, chunks, *shared)
    if kernel.advances:
        module.advance[(len(entries),)](static, *shared)


OPTIMIZERS = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
]


def start(sizes: tuple[int, ...], steps: int, dtype: torch.dtype) -> tuple[list, list]:
    generator = torch.Generator().manual_seed(7)
    params = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
    grads = [[torch.randn(n, generator=generator).to(dtype) for n in sizes] for _ in range(steps)]
    return params, grads


def run_torch(kind: Any, params: list, grads: list, dtype: torch.dtype, options: dict) -> list:
    """torch's optimizer in `dtype`, step counts too: role -> tensor for every parameter."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if dtype is torch.float64 else before)
    try:
        return step_all(kind, params, grads, dtype, options)
    finally:
        torch.set_default_dtype(before)


def step_all(kind: Any, params: list, grads: list, dtype: torch.dtype, options: dict) -> list:
    own = [param.to(dtype, copy=True) for param in params]
    optimizer = make(kind, own, **options)
    for step in grads:
        for param, grad in zip(own, step, strict=True):
            param.grad = grad.to(dtype, copy=True)
        single_step(optimizer)
    return [{"param": param, **state_of(optimizer, param)} for param in own]


def run_ours(
    kernel: ForeachKernel, folder: Path, kind: Any, params: list, grads: list, options: dict
) -> list:
    module = load(kernel, folder)
    lr = torch.tensor(LR, dtype=torch.float64)
    entries = []
    for param in params:
        own = param.clone()
        own.grad = torch.zeros_like(own)
        entries.append({"param": own, "lr": lr, **initial_state(kind, own, options)})
    for step in grads:
        for entry, grad in zip(entries, step, strict=True):
            entry["grad"] = grad.clone()
        launch(kernel, module, entries)
    return entries


def initial_state(kind: Any, param: Tensor, options: dict) -> dict[str, Tensor]:
    """The state as the optimizer creates it before its first update."""
    optimizer = make(kind, [param], **options)
    home = inspect.unwrap(kind.step).__module__
    update = f"_single_tensor_{home.rpartition('.')[2]}"
    with mock.patch.object(sys.modules[home], update, return_value=None):
        single_step(optimizer)
    return state_of(optimizer, param)


def assert_no_worse(ours: list, eager: list, exact: list, floor: float) -> None:
    """Every state is as near to fp64 as torch's own, within a factor of 2."""
    for mine, theirs, best in zip(ours, eager, exact, strict=True):
        for role, value in best.items():
            error = (mine[role].double() - value.double()).abs().max().item()
            limit = (theirs[role].double() - value.double()).abs().max().item()
            scale = value.double().abs().max().item()
            assert error <= 2 * limit + floor * scale, (role, error, limit)


# RAdam takes the root of a negative number in the branch that its `where` drops
@pytest.mark.filterwarnings("ignore:invalid value encountered in sqrt:RuntimeWarning")
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_three_steps_equal_torch(kind: Any, options: dict, tmp_path: Path) -> None:
    kernel = lower_foreach(*trace(kind, **options), chunk=2048)
    assert isinstance(kernel, ForeachKernel)
    params, grads = start(SIZES, 3, torch.float32)
    ours = run_ours(kernel, tmp_path, kind, params, grads, options)
    eager = run_torch(kind, params, grads, torch.float32, options)
    exact = run_torch(kind, params, grads, torch.float64, options)
    assert_no_worse(ours, eager, exact, floor=2e-7)
    for entry, param in zip(ours, params, strict=True):
        assert entry["step"].item() == 3
        assert not torch.equal(entry["param"], param)


COMPILE = """
import importlib.util, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

path, arch, shared = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
spec = importlib.util.spec_from_file_location("generated", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
tables = {"static": "*i64", "volatile": "*i64", "chunks": "*i32"}
for name, table_names in (("update", tables), ("advance", ["static"])):
    function = getattr(module, name, None)
    if function is None:
        continue
    signature = {table: tables[table] for table in table_names}
    signature.update((f"{role}_ptr", "*fp64") for role in shared)
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    source = ASTSource(fn=function, signature=signature, constexprs={}, attrs=attrs)
    options = {"num_warps": 4 if name == "update" else 1}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    print(f"==== {name}")
    print(compiled.asm["ptx"])
"""


def compile_only(kernel: ForeachKernel, folder: Path, arch: int) -> dict[str, str]:
    """PTX of `update` and `advance`, in a process where Triton isn't interpreting."""
    path = folder / "generated.py"
    path.write_text(kernel.source)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, "-c", COMPILE, str(path), str(arch), *kernel.shared_roles]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("==== ")[1:]
    return dict(zip(("update", "advance"), parts, strict=False))


def momentum(dtype: torch.dtype) -> tuple[fx.GraphModule, list[str], list[str]]:
    """A template that compiles fast."""

    def update(param: Tensor, grad: Tensor, buffer: Tensor, lr: Tensor) -> list[Tensor]:
        new = buffer * 0.9 + grad
        return [param - lr * new, new]

    example = [torch.ones(8, dtype=dtype) for _ in range(3)]
    template = make_fx(update)(*example, torch.tensor(LR, dtype=torch.float64))
    return template, ["param", "grad", "buffer", "lr"], ["param", "buffer"]


def vector_accesses(kernel: ForeachKernel, folder: Path) -> tuple[int, int]:
    """16-byte loads and stores of `update` on sm_90; asserts that nothing spills."""
    ptx = compile_only(kernel, folder, 90)["update"].splitlines()
    assert not any(".local" in line for line in ptx), "no spills"
    counts = [sum(f"{kind}.global.v4.b32" in line for line in ptx) for kind in ("ld", "st")]
    return counts[0], counts[1]


def test_aligned_adamw_moves_vectors(tmp_path: Path) -> None:
    kernel = lower_foreach(*trace(torch.optim.AdamW))
    assert isinstance(kernel, ForeachKernel)
    loads, stores = vector_accesses(kernel, tmp_path)
    assert loads >= 4, "param, grad and two moments"
    assert stores >= 3


def test_aligned_half_tensors_move_vectors_and_unaligned_ones_do_not(tmp_path: Path) -> None:
    kernel = lower_foreach(*momentum(torch.bfloat16))
    assert isinstance(kernel, ForeachKernel)
    loads, stores = vector_accesses(kernel, tmp_path)
    assert loads >= 3
    assert stores >= 2
    unaligned = lower_foreach(*momentum(torch.bfloat16), aligned=False)
    assert isinstance(unaligned, ForeachKernel)
    assert vector_accesses(unaligned, tmp_path) == (0, 0)


def test_bf16_moments_within_one_rounding(tmp_path: Path) -> None:
    template, roles, written = trace(torch.optim.AdamW, torch.bfloat16)
    kernel = lower_foreach(template, roles, written, chunk=2048)
    assert isinstance(kernel, ForeachKernel)
    assert kernel.bytes_per_element == 14
    params, grads = start(SIZES, 1, torch.bfloat16)
    ours = run_ours(kernel, tmp_path, torch.optim.AdamW, params, grads, {})
    exact = run_torch(torch.optim.AdamW, params, grads, torch.float64, {})
    for mine, best in zip(ours, exact, strict=True):
        for role in ("param", "exp_avg", "exp_avg_sq"):
            error = (mine[role].double() - best[role]).abs()
            # the interpreter truncates bf16, so a store may lose a whole unit of 2^-7
            assert (error <= 2**-7 * best[role].abs() + 1e-6).all(), role


def test_step_is_read_by_all_programs_before_it_moves(tmp_path: Path) -> None:
    kernel = lower_foreach(*trace(torch.optim.AdamW), chunk=1024)
    assert isinstance(kernel, ForeachKernel)
    update, advance = kernel.source.split("def advance(")
    assert "tl.store(step_ptr" not in update
    assert "tl.store(step_ptr" in advance


def test_same_template_gives_same_key() -> None:
    first, again = (lower_foreach(*trace(torch.optim.AdamW)) for _ in range(2))
    other = lower_foreach(*trace(torch.optim.AdamW, weight_decay=0.5))
    assert isinstance(first, ForeachKernel)
    assert isinstance(again, ForeachKernel)
    assert isinstance(other, ForeachKernel)
    assert first.key == again.key
    assert first.source == again.source
    assert other.key != first.key


def test_storage_types_override_the_template(tmp_path: Path) -> None:
    """fp32 parameters and moments, bf16 gradients."""
    template, roles, written = trace(torch.optim.AdamW)
    kernel = lower_foreach(template, roles, written, dtypes={"grad": torch.bfloat16}, chunk=2048)
    assert isinstance(kernel, ForeachKernel)
    assert kernel.bytes_per_element == 26
    params, grads = start(SIZES, 2, torch.float32)
    grads = [[grad.bfloat16() for grad in step] for step in grads]
    ours = run_ours(kernel, tmp_path, torch.optim.AdamW, params, grads, {})
    widened = [[grad.float() for grad in step] for step in grads]
    eager = run_torch(torch.optim.AdamW, params, widened, torch.float32, {})
    exact = run_torch(torch.optim.AdamW, params, widened, torch.float64, {})
    assert_no_worse(ours, eager, exact, floor=2e-7)


def test_an_unknown_operation_is_refused_by_name() -> None:
    def update(param: Tensor, grad: Tensor, lr: Tensor) -> list[Tensor]:
        return [param - lr * grad / grad.norm()]

    scalar = torch.tensor(LR, dtype=torch.float64)
    template = make_fx(update)(torch.ones(8), torch.ones(8), scalar)
    refusal = lower_foreach(template, ["param", "grad", "lr"], ["param"])
    assert isinstance(refusal, Refusal)
    assert "norm" in refusal.node
    assert refusal.stage == "codegen"


def test_chunks_cover_every_element_once() -> None:
    counts = [1, 0, 8192, 8193]
    table = chunk_table(counts, 8192)
    assert table.dtype is torch.int32
    assert table.tolist() == [[0, 0], [2, 0], [3, 0], [3, 1]]


def test_chunk_shrinks_until_the_gpu_is_full() -> None:
    assert chunk_for(124_000_000, 132) == 8192
    assert chunk_for(600_000, 132) == 1024


def test_the_interpreter_gets_one_big_block(tmp_path: Path) -> None:
    chunk = chunk_for(600_000, 1)
    kernel = lower_foreach(*trace(torch.optim.AdamW), chunk=chunk)
    assert isinstance(kernel, ForeachKernel)
    assert f"tl.arange(0, {chunk})" in kernel.source
    params, grads = start((chunk + 5,), 1, torch.float32)
    ours = run_ours(kernel, tmp_path, torch.optim.AdamW, params, grads, {})
    eager = run_torch(torch.optim.AdamW, params, grads, torch.float32, {})
    exact = run_torch(torch.optim.AdamW, params, grads, torch.float64, {})
    assert_no_worse(ours, eager, exact, floor=2e-7)


def test_only_tensors_of_one_dense_order_walk_together() -> None:
    param = torch.zeros(4, 6)
    assert walk_together({"param": param, "grad": param.clone(), "step": torch.zeros(())}) is None
    turned = torch.zeros(6, 4).t()
    assert walk_together({"param": turned, "grad": turned.clone()}) is None
    reason = walk_together({"param": param, "grad": torch.zeros(6, 4).t()})
    assert reason is not None
    assert "grad" in reason
    gaps = torch.zeros(4, 12)[:, ::2]
    assert walk_together({"param": gaps, "grad": torch.zeros(4, 12)[:, ::2]}) is not None


def test_alignment_is_read_from_the_addresses() -> None:
    base = torch.zeros(64)
    assert all_aligned([{"param": base, "step": torch.zeros(())}])
    assert not all_aligned([{"param": base[1:]}])
