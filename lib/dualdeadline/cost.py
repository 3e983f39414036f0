"""Measured times turned into a cost model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
        size = np.asarray(size_bytes, float)
        if not (np.isfinite(size) & (size >= 0)).all():
            raise ValueError(f"size is {size_bytes} bytes; needed: finite and not below 0")
        time = self.intercept_ms + self.slope_ms * size
        return float(time) if time.ndim == 0 else time

    @property
    def gbps(self) -> float:
        """Rate of a very large copy, 1e9 bytes per second (inf: size costs nothing)."""
        return 1e-6 / self.slope_ms if self.slope_ms else float("inf")
