"""Kernel IR to a Python module of Triton functions; the only place that writes syntax."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trainfuse.codegen.compiling import WAIT
from trainfuse.codegen.ir import (
    Barrier,
    Check,
    Constant,
    Define,
    Kernel,
    Load,
    Loop,
    Map,
    Module,
    Random,
    Reduce,
    Statement,
    Store,
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
    """Text of a complete, importable module: one @triton.jit function a launch."""
    parts = [HEADER, *("\n".join(_kernel(kernel, target)) + "\n" for kernel in module.kernels)]
    return "\n\n".join(parts)


def opening(name: str, parameters: Iterable[str], doc: str, target: Target) -> Iterator[str]:
    """How the text of every kernel begins: it waits before it touches memory."""
    yield "@triton.jit"
    yield f"def {name}({', '.join(parameters)}):"
    yield f'    """{doc}"""'
    if target.starts_early:
        yield f"    {WAIT}"


def _kernel(kernel: Kernel, target: Target) -> Iterator[str]:
    yield from opening(kernel.name, map(arg_name, kernel.args), kernel.doc, target)
    yield from _statements(kernel.body, "    ")


def _statements(body: Iterable[Statement], indent: str) -> Iterator[str]:
    for statement in body:
        match statement:
            case Constant(name, value):
                yield f"{indent}{name}: tl.constexpr = {value}"
            case Loop():
                yield from _loop(statement, indent)
            case _:
                yield _simple(statement, indent)


def _loop(loop: Loop, indent: str) -> Iterator[str]:
    if loop.note:
        yield f"{indent}# {loop.note}"
    yield f"{indent}for {loop.var} in range({loop.start}, {loop.stop}, {loop.step}):"
    yield from _statements(loop.body, indent + "    ")


def _simple(statement: Statement, indent: str) -> str:
    match statement:
        case Load(name, arg, offset, mask, cast, note, other, row, evict):
            guard = _mask(mask) + (f", other={other}" if mask and other else "")
            pointer, policy = _pointer(arg_name(arg), offset), _policy(evict)
            text = f"tl.load({pointer}{guard}{policy})"
            text = f"lib.load_row({pointer}, {row}{policy})" if row else text
            text = f"{name} = {text}" + (f".to({cast})" if cast else "")
        case Check(condition, message):
            text, note = f'tl.device_assert({condition}, "{message}")', ""
        case Store(arg, offset, value, mask, note, row, evict):
            pointer, policy = _pointer(arg_name(arg), offset), _policy(evict)
            text = f"tl.store({pointer}, {value}{_mask(mask)}{policy})"
            text = f"lib.store_row({pointer}, {value}, {row}{policy})" if row else text
        case (
            Define(name, expr, note)
            | Map(name, expr, note)
            | Reduce(name, expr, note)
            | Random(name, expr, note)
        ):
            text = f"{name} = {expr}"
        case Barrier(note):
            text = "tl.debug_barrier()"
        case _:
            raise AssertionError(statement)
    line = indent + text
    return f"{line.ljust(NOTE_COLUMN)}  # {note}" if note else line


def _pointer(arg: str, offset: str) -> str:
    return arg if offset == "0" else f"{arg} + {offset}"


def _policy(evict: str) -> str:
    return f', eviction_policy="evict_{evict}"' if evict else ""


def _mask(mask: str) -> str:
    return f", mask={mask}" if mask else ""
