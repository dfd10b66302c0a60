"""Kernel IR to a Python module of Triton functions; the only place that writes syntax."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainfuse.codegen.compiling import WAIT
from trainfuse.codegen.ir import (
    Barrier,
    Branch,
    Call,
    Check,
    Constant,
    Define,
    Function,
    Kernel,
    Load,
    Loop,
    Map,
    Module,
    Random,
    Reduce,
    Signal,
    Statement,
    Store,
    Take,
    Wait,
    While,
    arg_name,
)
from trainfuse.codegen.targets import Target

HEADER = """\
import triton
import triton.language as tl

from trainfuse.codegen import triton_lib as lib
from trainfuse.codegen.triton_lib import libdevice  # noqa: F401
"""
NOTE_COLUMN = 72


def print_module(module: Module, target: Target) -> str:
    """Text of a complete, importable module: a @triton.jit function a launch, and what it calls."""
    called = [_function(function) for kernel in module.kernels for function in kernel.functions]
    kernels = [_kernel(kernel, target) for kernel in module.kernels]
    return "\n\n".join([HEADER, *("\n".join(text) + "\n" for text in (*called, *kernels))])


def opening(name: str, parameters: Iterable[str], doc: str, target: Target) -> Iterator[str]:
    """How the text of every kernel begins: it waits before it touches memory."""
    yield from _head(name, parameters, doc)
    if target.starts_early:
        yield f"    {WAIT}"


def _head(name: str, parameters: Iterable[str], doc: str) -> Iterator[str]:
    yield "@triton.jit"
    yield f"def {name}({', '.join(parameters)}):"
    yield f'    """{doc}"""'


def _kernel(kernel: Kernel, target: Target) -> Iterator[str]:
    yield from opening(kernel.name, map(arg_name, kernel.args), kernel.doc, target)
    yield from _statements(kernel.body, "    ")


def _function(function: Function) -> Iterator[str]:
    parameters = [*map(arg_name, function.args), *function.numbers]
    yield from _head(function.name, parameters, function.doc)
    yield from _statements(function.body, "    ")


def _statements(body: Iterable[Statement], indent: str) -> Iterator[str]:
    for statement in body:
        match statement:
            case Constant(name, value):
                yield f"{indent}{name}: tl.constexpr = {value}"
            case Loop():
                yield from _loop(statement, indent)
            case While(condition, inside) | Branch(condition, inside):
                keyword = "while" if isinstance(statement, While) else "if"
                yield f"{indent}{keyword} {condition}:"
                yield from _statements(inside, indent + "    ")
            case _:
                yield _simple(statement, indent)


def _loop(loop: Loop, indent: str) -> Iterator[str]:
    if loop.note:
        yield f"{indent}# {loop.note}"
    yield f"{indent}for {loop.var} in range({loop.start}, {loop.stop}, {loop.step}):"
    yield from _statements(loop.body, indent + "    ")


def _simple(statement: Statement, indent: str) -> str:
    match statement:
        case Load(name, arg, offset, mask, cast, note, other, row):
            guard = _mask(mask) + (f", other={other}" if mask and other else "")
            pointer = _pointer(arg_name(arg), offset)
            text = f"lib.load_row({pointer}, {row})" if row else f"tl.load({pointer}{guard})"
            text = f"{name} = {text}" + (f".to({cast})" if cast else "")
        case Check(condition, message):
            text, note = f'tl.device_assert({condition}, "{message}")', ""
        case Store(arg, offset, value, mask, note, row):
            pointer = _pointer(arg_name(arg), offset)
            text = f"tl.store({pointer}, {value}{_mask(mask)})"
            text = f"lib.store_row({pointer}, {value}, {row})" if row else text
        case (
            Define(name, expr, note)
            | Map(name, expr, note)
            | Reduce(name, expr, note)
            | Random(name, expr, note)
        ):
            text = f"{name} = {expr}"
        case Barrier(note):
            text = "tl.debug_barrier()"
        case Take(name, arg, note):
            text = f"{name} = lib.take({arg_name(arg)})"
        case Signal(arg, offset, note):
            text = f"lib.signal({_pointer(arg_name(arg), offset)})"
        case Wait(arg, offset, count, note):
            text = f"lib.wait({_pointer(arg_name(arg), offset)}, {count})"
        case Call(function, numbers):
            given = ", ".join([*map(arg_name, function.args), *numbers])
            text, note = f"{function.name}({given})", ""
        case _:
            raise AssertionError(statement)
    line = indent + text
    return f"{line.ljust(NOTE_COLUMN)}  # {note}" if note else line


def _pointer(arg: str, offset: str) -> str:
    return arg if offset == "0" else f"{arg} + {offset}"


def _mask(mask: str) -> str:
    return f", mask={mask}" if mask else ""
