"""Options of Triton's compiler; imports nothing, for the workers."""

from __future__ import annotations

STAGES = 2  # of software pipelining, which Triton does around matrix products only


def compiler_options(num_warps: int, max_registers: int | None) -> dict[str, int]:
    """What a launch asks of the compiler: warps a program, and registers that a thread may take."""
    options = {"num_warps": num_warps, "num_stages": STAGES}
    return options if max_registers is None else {**options, "maxnreg": max_registers}


def assertions(source: str) -> dict[str, bool]:
    """Options that keep the checks of a text that has any: Triton drops them otherwise.

    Its own checks of integer overflow stay off: they come with the same option, in every addition.
    """
    return {"debug": True, "sanitize_overflow": False} if "device_assert(" in source else {}
