"""Options of Triton's compiler; imports nothing of ours, for the workers."""

from __future__ import annotations

import ast

WAIT = "lib.wait_for_previous()"
"""First statement of a kernel that may start early; the printer writes it."""
STAGES = 2  # of software pipelining, which Triton does around matrix products only


def compiler_options(num_warps: int, max_registers: int | None) -> dict[str, int]:
    """What a launch asks of the compiler: warps a program, and registers that a thread may take."""
    options = {"num_warps": num_warps, "num_stages": STAGES}
    return options if max_registers is None else {**options, "maxnreg": max_registers}


def early_start(source: str, function: str) -> dict[str, bool]:
    """Options that let a function of a text start before its predecessor ends, if it waits first.

    Read from the text that is compiled: without the wait, nothing orders the two kernels' accesses.
    """
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    body = found.body[1:] if ast.get_docstring(found) is not None else found.body
    return {"launch_pdl": True} if body and ast.unparse(body[0]) == WAIT else {}


def assertions(source: str) -> dict[str, bool]:
    """Options that keep the checks of a text that has any: Triton drops them otherwise.

    Its own checks of integer overflow stay off: they come with the same option, in every addition.
    """
    return {"debug": True, "sanitize_overflow": False} if "device_assert(" in source else {}
