"""Query the QueryNode while rows are written, and keep how long each query took and how fresh its result was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from tidewal import Client, QueryResult

from .figures import percentiles
from .flights import COLLECTION
from .retry import retry_until

Level = Literal["strong", "bounded"]

IN_THE_AIR = 'status == "departed" and origin == "JFK"'
WORST = 5
EVERY_S = 0.5
SHOWN_EVERY_S = 1.0


@dataclass(slots=True)
class Timings:
    """Timings of one consistency level: `age_ms` is how far results lay behind the log's present."""

    took_ms: list[float] = field(default_factory=list[float])
    age_ms: list[float] = field(default_factory=list[float])

    def figures(self) -> dict[str, dict[str, float]]:
        """As percentiles."""
        return {"took": percentiles(self.took_ms), "age": percentiles(self.age_ms)}


class Questions:
    """Strong and bounded queries in turn. `event_time` returns the event time that is written by now, `say` prints."""

    def __init__(self, client: Client, event_time: Callable[[], datetime | None], say: Callable[[str], None]) -> None:
        self.timings: dict[Level, Timings] = {"strong": Timings(), "bounded": Timings()}
        self._client = client
        self._event_time = event_time
        self._say = say
        self._shown = 0.0

    async def run(self) -> None:
        """Query until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.ask(show=time.monotonic() - self._shown >= SHOWN_EVERY_S)

    async def ask(self, *, show: bool) -> None:
        """Run each query at each level once, and print the results if `show`."""
        reached = self._event_time()
        if reached is None:
            return
        for level in self.timings:
            in_air, in_air_ms = await self._timed(level, IN_THE_AIR, columns=["id"])
            late, late_ms = await self._timed(
                level,
                f'event_time >= "{(reached - timedelta(hours=1)).isoformat()}" and dep_delay is not null',
                columns=["carrier", "flight", "origin", "dest", "dep_delay"],
                order_by=[("dep_delay", False)],
                limit=WORST,
            )
            if show:
                self._shown = time.monotonic()
                self._say(
                    f"{level:7}  in the air out of JFK: {in_air.table.num_rows} ({in_air_ms:.1f} ms, "
                    f"{in_air.age_ms:.0f} ms old)  worst delays of the hour: {_worst(late)} ({late_ms:.1f} ms, "
                    f"{late.age_ms:.0f} ms old)"
                )

    async def _timed(
        self,
        level: Level,
        filter: str,
        *,
        columns: list[str],
        order_by: list[tuple[str, bool]] | None = None,
        limit: int | None = None,
    ) -> tuple[QueryResult, float]:
        started = time.perf_counter()
        query, order = self._client.query, order_by or ()
        answer = await retry_until(
            query, COLLECTION, filter, columns=columns, order_by=order, limit=limit, consistency=level
        )
        took_ms = (time.perf_counter() - started) * 1000
        self.timings[level].took_ms.append(took_ms)
        self.timings[level].age_ms.append(answer.age_ms)
        return answer, took_ms


def _worst(answer: QueryResult) -> str:
    flights = answer.table.to_pylist()
    if not flights:
        return "none"
    first = flights[0]
    others = "".join(f", {each['dep_delay']:.0f}" for each in flights[1:])
    return (
        f"{first['dep_delay']:.0f}{others} min, led by {first['carrier']}{first['flight']} "
        f"{first['origin']}-{first['dest']}"
    )
