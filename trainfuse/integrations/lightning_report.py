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
    groups, aten_nodes: kernels' worth of fused nodes, and executed nodes that stay ATen, in those
    plans. gate: "pass" or the first kernel that failed its check. plain_ms, fused_ms: medians of
    the timed steps; extra_bytes: device memory reserved more than by plain steps; None when not
    measured.
    """

    kind: Kind
    reason: str | None
    plans: int = 0
    groups: int = 0
    aten_nodes: int = 0
    gate: str = "pass"
    plain_ms: float | None = None
    fused_ms: float | None = None
    extra_bytes: int | None = None

    @classmethod
    def of(cls, verdict: Verdict, loop: FusedLoop | None) -> FusionReport:
        """Read the figures as they are now; no device is waited for."""
        if loop is None:
            return cls(verdict.kind, verdict.reason)
        explanations, gates = [], []
        for compiled in loop.compiled:
            if compiled.plans:
                explanations.append(compiled.explain())
                gates.append(compiled.stats()["gate"])
        return cls(
            verdict.kind,
            verdict.reason,
            plans=loop.num_plans,
            groups=sum(len(e.groups) for e in explanations),
            aten_nodes=sum(len(e.aten_nodes) for e in explanations),
            gate=next((gate for gate in gates if gate != "pass"), "pass"),
            plain_ms=loop.plain_meter.median_ms,
            fused_ms=loop.fused_meter.median_ms,
            extra_bytes=loop.extra_bytes,
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)

    def line(self) -> str:
        """The summary, said once after warm-up."""
        how = {"whole_step": "whole step", "regions": "regions", "plain": "plain Lightning"}
        parts = [
            f"{how[self.kind]}, {self.groups} groups fused, {self.aten_nodes} ATen operators left"
        ]
        if self.fused_ms is not None:
            speed = f"{self.fused_ms:.2f} ms a step"
            if self.plain_ms is not None:
                speed += f", {self.plain_ms / self.fused_ms:.2f}x plain Lightning"
            parts.append(speed)
        if self.extra_bytes is not None:
            parts.append(f"{self.extra_bytes / 2**20:+.0f} MiB reserved")
        parts.append(f"gate {self.gate}")
        return "trainfuse: " + "; ".join(parts)
