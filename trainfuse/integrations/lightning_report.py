"""What became of a Lightning fit: the figures behind the summary line."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainfuse.integrations.lightning_loop import FusedLoop
from trainfuse.integrations.lightning_verdict import Kind, Verdict


@dataclass(frozen=True, slots=True)
class FusionReport:
    """How the steps of a fit run, and how fast.

    kind, reason: whole step, regions or plain, and why not better. plans: plans made for training.
    plain_ms, fused_ms: medians of the timed steps, None when not timed. stats: what
    `CompiledStep.stats()` said, empty when nothing was compiled.
    """

    kind: Kind
    reason: str | None
    plans: int
    plain_ms: float | None
    fused_ms: float | None
    stats: dict[str, Any]

    @classmethod
    def of(cls, verdict: Verdict, loop: FusedLoop | None) -> FusionReport:
        """Read the figures as they are now; no device is waited for."""
        if loop is None:
            return cls(verdict.kind, verdict.reason, 0, None, None, {})
        compiled = loop.step if loop.whole else loop.regions
        return cls(
            verdict.kind,
            verdict.reason,
            loop.num_plans,
            loop.plain_meter.median_ms,
            loop.fused_meter.median_ms,
            dict(compiled.stats()) if compiled is not None else {},
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)

    def line(self) -> str:
        """The summary, said once after warm-up."""
        parts = ["whole step" if self.kind == "whole_step" else "regions"]
        if self.fused_ms is not None and self.plain_ms is not None:
            speed = self.plain_ms / self.fused_ms
            parts.append(f"{self.fused_ms:.2f} ms a step, {speed:.2f}x plain Lightning")
        return "trainfuse: " + "; ".join(parts)
