"""What kernels are generated for: an argument of `lower`, never read from a tensor."""

from __future__ import annotations

from dataclasses import dataclass

INTERPRETER = "interpreter"


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU to generate for, or Triton's interpreter.

    arch: "sm_90" and so on, or "interpreter". num_sms: multiprocessors; persistent and partial
    schedules size their grids by it. max_registers: 32-bit registers a thread. l2_bytes: size of
    the L2 cache.
    """

    arch: str
    num_sms: int = 132
    max_registers: int = 255
    l2_bytes: int = 50 << 20

    @property
    def interpreted(self) -> bool:
        """Programs cost milliseconds each there: few programs, big blocks."""
        return self.arch == INTERPRETER

    @property
    def capability(self) -> int:
        """90 for "sm_90"; 0 for the interpreter."""
        return 0 if self.interpreted else int(self.arch.removeprefix("sm_").rstrip("a"))

    @property
    def starts_early(self) -> bool:
        """Whether a kernel can start before what the one before it wrote is in memory."""
        return self.capability >= 90


H200 = Target("sm_90", 132)
A100 = Target("sm_80", 108, l2_bytes=40 << 20)
B200 = Target("sm_100", 148, l2_bytes=126 << 20)
SIMULATED = Target(INTERPRETER, 2)


@dataclass(frozen=True, slots=True)
class CodegenOptions:
    """Choices that change the generated code, and therefore the kernel's key."""

    max_row_in_registers: int = 16384
    chunk: int = 8192
