"""A histogram of what comes in batches."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from prometheus_client import Histogram


class BatchHistogram(Histogram):
    """A histogram that takes many amounts at once, for a tenth of what `observe` costs for each."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        """`observe` each of `amounts`, in the unit of the metric."""
        self._raise_if_not_observable()
        self._sum.inc(sum(amounts))
        bounds = self._upper_bounds  # the last one is infinite
        for at, count in Counter([bisect_left(bounds, amount) for amount in amounts]).items():
            self._buckets[at].inc(count)
