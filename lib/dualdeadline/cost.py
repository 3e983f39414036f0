"""Measured times turned into a cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dualdeadline.schedule import Compute, Copy

SINGLE = ("silent_ms", "handoff_ms", "issue_ms", "sync_ms")  # parts of a cost model that are one number


@dataclass(frozen=True)
class TransferModel:
    """Time of one copy over a link: a line with a fixed cost per copy.

    Attributes:
        intercept_ms: milliseconds that every copy costs, at least 0.
        slope_ms: milliseconds per byte, at least 0.
    """

    intercept_ms: float
    slope_ms: float

    @classmethod
    def fit(cls, size_bytes, ms) -> TransferModel:
        """Least-squares line through measured copies, neither intercept nor slope below 0.

        Args:
            size_bytes: `[n]` sizes, at least two different ones.
            ms: `[n]` milliseconds of each.

        Raises:
            ValueError: lengths that differ, fewer than two sizes, values that are not finite or below 0.
        """
        size, ms = np.asarray(size_bytes, float), np.asarray(ms, float)
        if size.ndim != 1 or size.shape != ms.shape:
            raise ValueError(f"sizes {size.shape} and times {ms.shape}; needed: two lists of one length")
        if len(np.unique(size)) < 2:
            raise ValueError(f"{len(np.unique(size))} different sizes; needed: at least 2")
        if not (np.isfinite(size) & np.isfinite(ms) & (size >= 0) & (ms >= 0)).all():
            raise ValueError("a size or time is below 0 or not finite; needed: finite bytes and milliseconds")
        away = size - size.mean()
        slope = (away @ ms) / (away @ away)
        intercept = ms.mean() - slope * size.mean()
        # The error is convex in both, so with one of them below 0 the best allowed point has that one at 0;
        # times are not below 0, so the other one then is not either.
        if slope < 0:
            slope, intercept = 0.0, ms.mean()
        elif intercept < 0:
            slope, intercept = (size @ ms) / (size @ size), 0.0
        return cls(float(intercept), float(slope))

    def ms(self, size_bytes):
        """Milliseconds of a copy: a float for one size, an array like `size_bytes` for several.

        Raises:
            ValueError: a size below 0 or not finite.
        """
        if type(size_bytes) is int and size_bytes >= 0:  # the simulator asks for one size at a time, very often
            return self.intercept_ms + self.slope_ms * size_bytes
        size = np.asarray(size_bytes, float)
        if not (np.isfinite(size) & (size >= 0)).all():
            raise ValueError(f"size is {size_bytes} bytes; needed: finite and not below 0")
        time = self.intercept_ms + self.slope_ms * size
        return float(time) if time.ndim == 0 else time

    @property
    def gbps(self) -> float:
        """Rate of a very large copy, 1e9 bytes per second (inf: size costs nothing)."""
        return 1e-6 / self.slope_ms if self.slope_ms else float("inf")


@dataclass(frozen=True)
class CostModel:
    """Times of single operations, from which `simulate.run` builds any schedule.

    Every number comes from a measurement of its own kind (trains of copies, single kernels, launches); none
    belongs to a schedule or a configuration.

    Attributes:
        transfer: a copy behind another one.
        silent_ms: what a copy costs more when the link was silent before.
        stages: by stage, time of its kernel as a line in the weight bytes that it reads; see `work_bytes`.
        component_bytes: dict(gate_up, down), of one expert.
        handoff_ms: from the end of a copy to the start of a kernel that waits for it.
        issue_ms, sync_ms: host time to issue a copy and to learn a verdict; 0 in a CUDA graph.
        launches: by stage, host time to launch it as a line in its number of experts; none in a CUDA graph.
        before_ms: `[L]` work of each layer up to its router; one value serves all layers.
        committed: speculative copies handed to the device ahead, which no verdict can cancel.
    """

    transfer: TransferModel
    stages: Mapping[str, TransferModel]
    component_bytes: Mapping[str, int]
    silent_ms: float = 0.0
    handoff_ms: float = 0.0
    issue_ms: float = 0.0
    sync_ms: float = 0.0
    launches: Mapping[str, TransferModel] = field(default_factory=dict)
    before_ms: tuple[float, ...] = (0.0,)
    committed: int = 0

    def copy_ms(self, size_bytes: int, silent: bool) -> float:
        return self.transfer.ms(size_bytes) + (self.silent_ms if silent else 0.0)

    def compute_ms(self, op: Compute, waited: bool = False) -> float:
        """Time of a stage on the compute queue; `waited`: it starts because a copy has just ended."""
        late = self.handoff_ms if waited else 0.0
        if op.stage == "before":
            return late + self.before_ms[min(op.layer, len(self.before_ms) - 1)]
        if op.stage not in self.stages:
            raise ValueError(f"no time for stage {op.stage!r}; calibrated: {', '.join(self.stages)}")
        return late + self.stages[op.stage].ms(work_bytes(op.stage, len(op.experts), self.component_bytes))

    def host_ms(self, op) -> float:
        if isinstance(op, Compute):
            return self.launches[op.stage].ms(len(op.experts)) if op.stage in self.launches else 0.0
        return self.issue_ms if isinstance(op, Copy) else self.sync_ms

    def parts(self) -> dict[str, float]:
        """Every calibrated number by name, for a record; `from_parts` gives the model back."""
        lines = {"transfer": self.transfer} | {f"stage {name}": line for name, line in self.stages.items()}
        lines |= {f"launch {name}": line for name, line in self.launches.items()}
        found = {f"{name} {part}": getattr(line, f"{part}_ms") for name, line in lines.items()
                 for part in ("intercept", "slope")}
        return found | {name: getattr(self, name) for name in SINGLE} | {"committed": self.committed}

    @classmethod
    def from_parts(cls, parts: Mapping[str, float], component_bytes: Mapping[str, int]) -> CostModel:
        """The model that `parts` came from; `before_ms` is left at 0.

        Raises:
            KeyError: a part is missing.
        """
        def line(name: str) -> TransferModel:
            return TransferModel(parts[f"{name} intercept"], parts[f"{name} slope"])

        def lines(kind: str) -> dict[str, TransferModel]:
            names = {name.rsplit(" ", 1)[0] for name in parts if name.startswith(kind)}
            return {name.removeprefix(f"{kind} "): line(name) for name in sorted(names)}

        return cls(line("transfer"), lines("stage"), component_bytes, launches=lines("launch"),
                   committed=int(parts["committed"]), **{name: parts[name] for name in SINGLE})


def work_bytes(stage: str, experts: int, component_bytes: Mapping[str, int]) -> int:
    """Weight bytes that a stage reads, or decodes, for so many experts (`combine` reads none)."""
    if stage == "decode_expert":
        return experts * (component_bytes["gate_up"] + component_bytes["down"])
    name = stage.removeprefix("decode_")
    component = {"gate_up": "gate_up", "down": "down", "down_combine": "down"}.get(name)
    return experts * component_bytes[component] if component else 0
