"""Programs: the text, what it frees and writes in place, and that it computes the graph."""

from __future__ import annotations

import gc
import inspect
import linecache
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from autodiff.reference import run_graph
from tests.runtime.graphs import cloned, flat_kernel, group_of, plan_of, randn, trace
from trainfuse.codegen.ir import GroupKernel
from trainfuse.codegen.lower import lower
from trainfuse.codegen.targets import SIMULATED
from trainfuse.runtime.cache import KernelCache
from trainfuse.runtime.memory import Step, place_mutations
from trainfuse.runtime.program import RuntimeOptions, build_program

EAGER = RuntimeOptions("eager")


def interpreted() -> RuntimeOptions:
    return RuntimeOptions("triton", cache=KernelCache(None))


def mlp(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.ops.aten.addmm.default(b, x, w.t())
    split = torch.ops.aten.split.Tensor(torch.tanh(h), 3, 1)
    return split[0] * 2.0, split[1].sum(dim=[0], dtype=torch.float64)


def test_eager_program_computes_the_graph_and_reads_like_it() -> None:
    args = [randn(5, 4), randn(6, 4), randn(6)]
    tg = trace(mlp, args, backward_from=4)
    program = build_program(tg, None, {}, {}, EAGER)
    torch.testing.assert_close(program(cloned(args)), run_graph(tg, args), rtol=0, atol=0)
    assert "aten.addmm.default(b_1, x_1, t)" in program.source
    assert "    getitem, getitem_1 = aten.split.Tensor(tanh, 3, 1)\n" in program.source
    assert "dtype=torch.float64" in program.source
    assert "# forward" in program.source
    assert "# backward" in program.source
    assert "# model.py:2" in program.source


LAYOUTS = {
    "rows": lambda: randn(3, 4),
    "permuted": lambda: randn(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": lambda: randn(6, 8)[::2, 1::3],
    "expanded": lambda: randn(3, 1).expand(3, 4),
    "permuted and expanded": lambda: randn(3, 1, 2).expand(3, 4, 2).permute(2, 1, 0),
    "no dim": lambda: randn(),
    "empty": lambda: randn(0, 4).t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.bool])
def test_a_cast_is_called_as_an_operator_that_does_the_same(
    layout: str, dtype: torch.dtype
) -> None:
    convert = torch.ops.prims.convert_element_type.default
    value = LAYOUTS[layout]()
    tg = trace(lambda x: convert(x, dtype), [value])
    program = build_program(tg, None, {}, {}, EAGER)
    assert "prims" not in program.source
    (made,), expected = program([value]), convert(value, dtype)
    assert (made.dtype, made.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(made, expected)
    assert made.data_ptr() != value.data_ptr() or not value.numel()


def test_results_that_nobody_reads_are_freed_at_once() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        _, indices = torch.ops.aten.sort.default(x)
        mean, rstd = torch.ops.aten.native_layer_norm.default(x, [4], None, None, 1e-5)[1:]
        return indices, mean + rstd

    args = [randn(3, 4)]
    tg = trace(fn, args)
    tg.graph.eliminate_dead_code()
    facts = {node: fact for node, fact in tg.facts.items() if node in set(tg.graph.nodes)}
    program = build_program(tg.replace(facts=facts), None, {}, {}, EAGER)
    torch.testing.assert_close(program(cloned(args)), run_graph(tg, args), rtol=0, atol=0)
    assert "    _, getitem_1 = aten.sort.default(x_1)\n    del _\n" in program.source


def test_constants_and_odd_arguments_survive_printing() -> None:
    constant = torch.arange(4.0)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.clamp(x, min=float("-inf"), max=float("inf")) + constant
        z = torch.full((2,), float("nan"), device="cpu", dtype=torch.float16)
        return y.to(torch.bfloat16, memory_format=torch.contiguous_format), z

    args = [randn(3, 4)]
    gm = trace(fn, args)
    program = build_program(gm, None, {}, {}, EAGER)
    torch.testing.assert_close(
        program(cloned(args)), run_graph(gm, args), rtol=0, atol=0, equal_nan=True
    )


def test_names_never_collide() -> None:
    def fn(aten: Tensor, forward_0: Tensor, step: Tensor) -> Tensor:
        return torch.exp(aten + forward_0) * step

    args = [randn(4), randn(4), randn(4)]
    tg = trace(fn, args)
    for node, name in zip(
        tg.graph.find_nodes(op="placeholder"), ("aten", "forward_0", "step"), strict=True
    ):
        node.name = name
    add, exp, _ = tg.nodes()
    group = group_of(tg, "forward_0", [add, exp])
    kernels = {"forward_0": flat_kernel(group, ["t0 = tl.exp(in0 + in1)"])}
    program = build_program(tg, plan_of(tg, group), kernels, {}, interpreted())
    torch.testing.assert_close(program(cloned(args)), run_graph(tg, args))


def test_values_die_at_their_last_use() -> None:
    seen: list[int] = []
    alive: list[weakref.ref[Tensor]] = []

    def fn(x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.sin(x)
        return x

    tg = trace(fn, [randn(8)])
    program = build_program(tg, None, {}, {}, EAGER)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            alive.append(weakref.ref(result))
            seen.append(sum(ref() is not None for ref in alive))
            return result

    with Watch():
        program(cloned([randn(8)]))
    assert max(seen) == 2  # an operand and a result; the input list was emptied


def test_the_callers_list_is_emptied() -> None:
    tg = trace(lambda x: torch.sin(x), [randn(8)])
    args = [randn(8)]
    build_program(tg, None, {}, {}, EAGER)(args)
    assert args == []


def test_tracebacks_show_the_line_and_the_text_is_forgotten_with_the_program() -> None:
    tg = trace(lambda x, y: torch.mm(torch.sin(x), y), [randn(3, 3), randn(3, 3)])
    program = build_program(tg, None, {}, {}, EAGER)
    with pytest.raises(RuntimeError) as error:
        program([randn(3, 3), randn(4, 4)])
    shown = "".join(traceback.format_tb(error.value.__traceback__))
    assert "mm = aten.mm.default(sin, y_1)" in shown
    assert inspect.getsource(program._step) == program.source.lstrip("\n")
    name = program.filename
    del program, error
    gc.collect()
    assert name not in linecache.cache


def group_program(mutates: tuple[int, ...] = ()):
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.exp(x) + y
        return z * z, z

    args = [randn(40, 50), randn(40, 50)]
    tg = trace(fn, args, mutates=mutates)
    group = group_of(tg, "forward_0", tg.nodes())
    kernel = flat_kernel(group, ["t0 = tl.exp(in0) + in1", "t1 = t0 * t0"])
    return tg, plan_of(tg, group), {"forward_0": kernel}, args


def test_groups_are_launched_with_eagers_strides() -> None:
    tg, plan, kernels, args = group_program()
    program = build_program(tg, plan, kernels, {}, interpreted())
    torch.testing.assert_close(program(cloned(args)), run_graph(tg, args))
    assert "forward_0(x_1, y_1, out=[add, mul])" in program.source
    assert "torch.empty_strided((40, 50), (50, 1), dtype=torch.float32" in program.source


def test_a_group_without_a_kernel_is_printed_as_aten() -> None:
    tg, plan, _, args = group_program()
    program = build_program(tg, plan, {}, {}, interpreted())
    torch.testing.assert_close(program(cloned(args)), run_graph(tg, args), rtol=0, atol=0)
    assert "forward_0" not in program.source
    assert "aten.exp.default(x_1)" in program.source


def test_a_new_value_is_written_straight_into_the_input() -> None:
    tg, plan, kernels, args = group_program(mutates=(1,))
    program = build_program(tg, plan, kernels, {}, interpreted())
    given = cloned(args)
    buffer = given[1]
    (result,) = program(given)
    expected, new = run_graph(tg, args)
    torch.testing.assert_close((result, buffer), (expected, new))
    assert "forward_0(x_1, y_1, out=[y_1, mul])" in program.source
    assert "copy_" not in program.source


def check_mutation(fn, shapes, mutates, num_groups=0):
    """Run eagerly; compare outputs and inputs with the functional graph's."""
    args = [randn(*shape) for shape in shapes]
    tg = trace(fn, args, mutates=mutates)
    program = build_program(tg, None, {}, {}, EAGER)
    given = cloned(args)
    inputs = list(given)
    outputs = program(given)
    expected = run_graph(tg, args)
    torch.testing.assert_close(outputs, expected[: tg.num_outputs], rtol=0, atol=0)
    news = dict(zip(mutates, expected[tg.num_outputs :], strict=True))
    for i, (before, after) in enumerate(zip(args, inputs, strict=True)):
        torch.testing.assert_close(after, news.get(i, before), rtol=0, atol=0)
    return program.source


def test_copies_wait_for_the_last_reader_of_the_old_value() -> None:
    def fn(x: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
        new = running * 0.9 + x
        flat = running.view(-1)
        return (flat * 2.0) + new.view(-1), new

    source = check_mutation(fn, [(3, 4), (3, 4)], (1,))
    assert source.index("flat" if "flat" in source else "mul_1 =") < source.index("copy_")


def test_swapped_inputs_keep_both_values() -> None:
    check_mutation(lambda a, b: (a + b, b, a), [(4,), (4,)], (0, 1))


def test_an_output_that_views_a_mutated_input_keeps_the_old_value() -> None:
    check_mutation(lambda a, b: (a.view(-1), a * 2.0 + b), [(2, 3), (2, 3)], (0,))


def test_a_new_value_that_views_its_own_input_is_right() -> None:
    check_mutation(lambda a: (a.sum(), a.t()), [(3, 3)], (0,))


def test_a_new_value_that_is_also_returned_does_not_alias_the_input() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.exp(x) + y
        return z, z

    args = [randn(8), randn(8)]
    tg = trace(fn, args, mutates=(1,))
    group = group_of(tg, "forward_0", tg.nodes())
    kernel = flat_kernel(group, ["t0 = tl.exp(in0) + in1"])
    program = build_program(tg, plan_of(tg, group), {"forward_0": kernel}, {}, interpreted())
    given = cloned(args)
    buffer = given[1]
    (result,) = program(given)
    torch.testing.assert_close(result, buffer)
    assert result.data_ptr() != buffer.data_ptr()


def test_a_later_reader_keeps_a_kernel_out_of_the_input() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.exp(x) + y
        return torch.cos(y), z

    args = [randn(8), randn(8)]
    tg = trace(fn, args, mutates=(1,))
    exp, add, _ = tg.nodes()
    group = group_of(tg, "forward_0", [exp, add])
    kernel = flat_kernel(group, ["t0 = tl.exp(in0) + in1"])
    program = build_program(tg, plan_of(tg, group), {"forward_0": kernel}, {}, interpreted())
    given = cloned(args)
    buffer = given[1]
    outputs = program(given)
    torch.testing.assert_close([*outputs, buffer], run_graph(tg, args))
    assert program.source.index("aten.cos") < program.source.index("y_1.copy_(add)")


def test_a_transposed_read_keeps_a_kernel_out_of_the_input() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(x) + y + y.t()

    args = [randn(8, 8), randn(8, 8)]
    tg = trace(fn, args, mutates=(1,))
    exp, add, view, last = tg.nodes()
    group = group_of(tg, "forward_0", [exp, add, last])
    assert set(group.inputs) == {*tg.graph.find_nodes(op="placeholder"), view}
    steps = [Step("aten", tuple(view.all_input_nodes), (view,), node=view)]
    steps.append(Step("group", group.inputs, group.outputs, name="forward_0", group=group))
    assert place_mutations(tg, steps).in_place == {}


def test_a_value_made_twice_is_not_written_over_an_input_still_read() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.exp(x)
        return torch.cos(z) + y, z

    args = [randn(8), randn(8)]
    tg = trace(fn, args, mutates=(1,))
    exp, cos, add = tg.nodes()
    first = group_of(tg, "forward_0", [exp])
    again = group_of(tg, "forward_1", [exp, cos])
    steps = [
        Step("group", group.inputs, group.outputs, name=group.name, group=group)
        for group in (first, again)
    ]
    steps.insert(1, Step("aten", tuple(add.all_input_nodes), (add,), node=add))
    assert place_mutations(tg, steps).in_place == {}


def test_a_store_may_come_before_an_unrelated_load_of_the_input() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y * 2.0, torch.exp(x)

    args = [randn(8), randn(8)]
    tg = trace(fn, args, mutates=(1,))
    mul, exp = tg.nodes()
    group = group_of(tg, "forward_0", [exp, mul])
    assert group.outputs == (exp, mul)
    step = Step("group", group.inputs, group.outputs, name="forward_0", group=group)
    assert place_mutations(tg, [step]).in_place == {}


def row_statistics(x: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean(1, keepdim=True)
    return torch.exp(x - mean), mean.view(-1) * 0.1 + running * 0.9


def column_statistics(x: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean(0)
    return mean * 2.0, mean * 0.1 + running * 0.9


def old_value_in_a_row(x: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean(1, keepdim=True)
    old = running * 0.9
    return x - mean - old.view(-1, 1), mean.view(-1) * 0.1 + old


def old_value_in_a_result(x: Tensor, running: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(1, keepdim=True)
    old = running * 0.9
    return x - mean, old * 2.0, mean.view(-1) * 0.1 + old


def old_value_under_a_sum(x: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
    mean = (x - running.view(-1, 1)).mean(1, keepdim=True)
    return x - mean, mean.view(-1) + running


@pytest.mark.parametrize(
    ("fn", "size", "written"),
    [
        (row_statistics, 5, True),
        (column_statistics, 7, True),
        # all threads of a program read the old value: one of them must not write meanwhile
        (old_value_in_a_row, 5, False),
        (old_value_in_a_result, 5, False),
        (old_value_under_a_sum, 5, False),
    ],
)
def test_running_statistics_are_written_by_the_kernel_that_sums(
    fn: Any, size: int, written: bool
) -> None:
    args = [randn(5, 7), randn(size)]
    tg = trace(fn, args, mutates=(1,))
    group = group_of(tg, "forward_0", tg.nodes())
    assert group.domain.kind == ("column" if fn is column_statistics else "row")
    kernel = lower(group, SIMULATED)
    assert isinstance(kernel, GroupKernel)
    program = build_program(tg, plan_of(tg, group), {"forward_0": kernel}, {}, interpreted())
    given = cloned(args)
    buffer = given[1]
    outputs = program(given)
    torch.testing.assert_close([*outputs, buffer], run_graph(tg, args))
    assert (".copy_(" not in program.source) is written
