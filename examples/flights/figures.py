"""Latencies and rates as they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def percentiles(values_ms: Sequence[float]) -> dict[str, float]:
    """The median, the 99th percentile and the number of some latencies."""
    if not values_ms:
        return {"p50_ms": 0.0, "p99_ms": 0.0, "count": 0}
    p50, p99 = np.percentile(np.asarray(values_ms), (50, 99)).tolist()
    return {"p50_ms": round(p50, 3), "p99_ms": round(p99, 3), "count": len(values_ms)}


def shown(figures: Mapping[str, float]) -> str:
    """Percentiles as text."""
    return f"p50 {figures['p50_ms']:,.2f} ms, p99 {figures['p99_ms']:,.2f} ms ({figures['count']:,.0f})"
