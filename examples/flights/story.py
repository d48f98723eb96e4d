"""The demo's steps, one after the other. Each is a method that can be read beside its output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
import time
from collections.abc import Generator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc

from tidewal import Client, CollectionSchema, Field, Standalone, errors, load_settings, standalone
from tidewal.runtime import physical_ms, shown_url

from . import agreement, chart, expectation, flights
from .figures import percentiles, shown
from .questions import Questions
from .replay import IN_FLIGHT, Replay
from .retry import retry_until
from .screen import ReportProgress, Screen

PROGRESS_EVERY_S = 0.25
TABLE_ROWS = 8
BUSY_HOUR = 10  # departures from which on an hour's mean says something


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command line. `wal` is the URL of the log, `tables` the path or URL of the tables;
    `metrics_port` 0 is off."""

    directory: Path
    events: int | None
    spark: bool
    serve: bool
    wal: str = field(repr=False)  # may hold credentials
    tables: str
    metrics_port: int
    chart: Path


class Demo:
    """A replay of the flights through a standalone node in `options.directory`, and the proof that all agree."""

    def __init__(self, options: DemoOptions, screen: Screen) -> None:
        self._options = options
        self._screen = screen
        self._url = options.wal
        self._seconds: dict[str, float] = {}
        self.figures: dict[str, object] = {}
        self.agreed: bool | None = None  # not known before the proof

    async def run(self) -> None:
        """Run all steps; `agreed` has the result afterwards. Raises the error of a role of the node that fails for
        good."""
        started = time.perf_counter()
        screen, options = self._screen, self._options
        screen.heading("A node on a log of its own")
        settings = load_settings(arguments={"metrics.port": options.metrics_port, "tables": options.tables})
        async with AsyncExitStack() as stack:
            with self._timed("start"):
                node = await stack.enter_async_context(standalone(options.directory, wal=self._url, settings=settings))
            screen.say(f"log     {shown_url(self._url)}")
            screen.say(f"tables  {options.tables}")
            if options.metrics_port:
                screen.say(f"metrics http://{settings.metrics.host}:{options.metrics_port}/metrics")
            await node.run(self._steps(node, started))
            if options.serve:
                screen.say()
                screen.say("The node goes on running (--serve); Ctrl-C ends it.")
                await node.run()

    async def _steps(self, node: Standalone, started: float) -> None:
        async with node.client() as client:
            events, done = await self._prepare(client)
            await self._write(node, client, events, done)
            upto = await self._store(client)
            views = [await agreement.querynode_view(client, upto)]
        views.append(await asyncio.to_thread(agreement.delta_view, self._options.tables, upto))
        if self._options.spark:
            views.insert(0, await self._spark(upto))
        agreed = await self._agree(upto, events.num_rows, views)
        await self._draw_chart(views)
        self._summary(agreed, time.perf_counter() - started)
        self.agreed = agreed

    # ---- writing ----------------------------------------------------------------------------------------------------

    async def _prepare(self, client: Client) -> tuple[pa.Table, int]:
        """The events, and how many of them the log already holds."""
        screen, limit = self._screen, self._options.events
        with self._timed("load"):
            events = await asyncio.to_thread(lambda: flights.events(flights.load(), limit))
        fields = tuple(Field(name, kind, nullable) for name, kind, nullable in flights.SCHEMA)
        schema = CollectionSchema(flights.COLLECTION, fields, flights.PRIMARY_KEY)
        await retry_until(client.create_collection, schema)
        done = await self._durable(client, events)
        first, last = events["event_time"][0].as_py(), events["event_time"][-1].as_py()
        screen.say(f"events  {events.num_rows:,}, from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC")
        if done:
            screen.say(f"resumes {done:,} events are in the log already")
        return events, done

    async def _durable(self, client: Client, events: pa.Table) -> int:
        """How many events are in the log: a beginning of them, since they are written in order (see `Replay`)."""
        stats = await retry_until(client.stats, flights.COLLECTION, consistency="strong")
        done = sum(stats.versions.values())
        where = shown_url(self._url)
        if done > events.num_rows:
            raise errors.InvalidRequest(
                f"{where} holds {done:,} events, more than the {events.num_rows:,} asked for: give --events {done} or "
                "more, or another log"
            )
        beginning = events.slice(0, done).group_by("_op").aggregate([([], "count_all")]).to_pylist()
        expected = {cast(str, each["_op"]): cast(int, each["count_all"]) for each in beginning}
        rows = expected.get("insert", 0) - expected.get("delete", 0)
        if {op: count for op, count in stats.versions.items() if count} != expected or stats.rows != rows:
            raise errors.InvalidRequest(
                f"{where} holds {done:,} row versions that are not the first events ({dict(stats.versions)}, expected "
                f"{expected}): something else wrote into it; use another log"
            )
        return done

    async def _write(self, node: Standalone, client: Client, events: pa.Table, done: int) -> None:
        screen = self._screen
        screen.heading("Replay: durable, acknowledged writes, and questions while they flow")
        replay = Replay(client, list(flights.batches(events.slice(done))) if done < events.num_rows else [], done)
        if done == events.num_rows:
            replay.event_time = events["event_time"][-1].as_py()
        questions = Questions(client, lambda: replay.event_time, screen.say)
        with screen.progress(events.num_rows, done) as report:
            beside = [
                asyncio.create_task(questions.run()),
                asyncio.create_task(_report(report, replay, node, client)),
            ]
            writing = asyncio.create_task(replay.run())
            try:
                await asyncio.wait([writing, *beside], return_when=asyncio.FIRST_COMPLETED)
                for failed in (task for task in beside if task.done()):
                    failed.result()
                await writing
                await _show_progress(report, replay, node, client)
            finally:
                for task in (writing, *beside):
                    task.cancel()
                await asyncio.gather(writing, *beside, return_exceptions=True)
        await questions.ask(show=True)
        self._seconds["write"] = replay.seconds
        self.figures["write"] = {
            "events": replay.written,
            "seconds": round(replay.seconds, 3),
            "events_per_s": round(replay.rate),
            "refused": replay.pauses,
            **percentiles(replay.latencies_ms),
        }
        self.figures["questions"] = {level: timings.figures() for level, timings in questions.timings.items()}
        screen.say(
            f"{replay.written:,} events in {replay.seconds:.1f} s: {replay.rate:,.0f}/s, in batches of "
            f"{flights.ROWS_PER_BATCH:,}, {IN_FLIGHT} in flight"
        )

    async def _store(self, client: Client) -> int:
        """The cut that everything is compared at, and the tables brought up to it."""
        self._screen.heading("Delta: flush, then compact")
        upto = await retry_until(client.cut, flights.COLLECTION)
        with self._timed("flush"):
            await retry_until(client.flush, flights.COLLECTION)
        with self._timed("compact"):
            compacted = await retry_until(client.compact, flights.COLLECTION)
        commits = await asyncio.to_thread(agreement.commits, self._options.tables)
        self.figures["tables"] = {
            "log_commits": commits,
            "flush_s": round(self._seconds["flush"], 3),
            "compact_s": round(self._seconds["compact"], 3),
        }
        self._screen.say(
            f"{commits} commits hold all row versions; the last flush took {self._seconds['flush']:.2f} s, compaction "
            f"to {compacted['rows']:,} current rows {self._seconds['compact']:.2f} s"
        )
        return upto

    # ---- reading ----------------------------------------------------------------------------------------------------

    async def _spark(self, upto: int) -> agreement.ReaderView:
        """Spark's view. Spark reads through this process, so it runs on a thread while the node serves."""
        from .spark_part import SparkPart

        screen = self._screen
        screen.heading("Spark: a windowed stream and a batch read")
        part = SparkPart(self._options.directory.absolute() / "spark", self._url)
        work = asyncio.ensure_future(asyncio.to_thread(part.run, upto))
        try:
            result = await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.to_thread(part.stop)
            with contextlib.suppress(Exception):  # what ends it now is the interruption
                await work
            raise
        self._seconds |= {"Spark start": result.start_s, "stream": result.stream_s, "batch": result.batch_s}
        self.figures["spark"] = {
            "start_s": round(result.start_s, 3),
            "stream_s": round(result.stream_s, 3),
            "batch_s": round(result.batch_s, 3),
            "micro_batches": result.micro_batches,
        }
        screen.say("Mean departure delay by origin and hour of event time, from spark.readStream; the worst hours:")
        busy = result.windows.filter(pc.field("departures") >= BUSY_HOUR)
        screen.table(
            ["origin", "hour, UTC", "departures", "mean delay, min"],
            [
                [row["origin"], f"{row['hour']:%Y-%m-%d %H:%M}", str(row["departures"]), f"{row['mean_dep_delay']:.1f}"]
                for row in busy.sort_by([("mean_dep_delay", "descending")]).slice(0, TABLE_ROWS).to_pylist()
            ],
            left=2,
        )
        screen.say(
            f"Of {result.windows.num_rows:,} windows, {busy.num_rows:,} with {BUSY_HOUR} departures or more. "
            f"{result.micro_batches} micro-batches in this run, each an interval of the log between two cuts."
        )
        screen.say(
            "The watermark on event time allows no delay, and nothing is late: log time never falls, and the events "
            "were written in the order of event time."
        )
        return agreement.ReaderView.of("Spark", result.versions, result.current, result.windows)

    async def _agree(self, upto: int, events: int, views: list[agreement.ReaderView]) -> bool:
        screen = self._screen
        screen.heading("Agreement")
        with self._timed("expectation"):
            expected = agreement.expected_view(await asyncio.to_thread(expectation.expect, events))
        screen.say(f"All readers as of T = {upto}; expected is computed by pyarrow from the file alone.")
        columns = ["", expected.name, *(view.name for view in views)]
        screen.table(columns, agreement.rows(expected, views, screen.good, screen.bad))
        differences = agreement.compare(expected, views)
        for each in differences:
            screen.say(f"{each.reader}, {each.what}: {each.found}, expected {each.expected}")
        self.figures["agreement"] = {
            "T": upto,
            "agreed": not differences,
            "checksum": f"{expected.checksum:016x}",
            "versions": expected.versions,
            "current_rows": expected.current_rows,
            "differences": [asdict(each) for each in differences],
        }
        return not differences

    # ---- the end ----------------------------------------------------------------------------------------------------

    async def _draw_chart(self, views: list[agreement.ReaderView]) -> None:
        windows = next(view.windows for view in views if view.windows is not None)
        with self._timed("picture"):
            path = await asyncio.to_thread(chart.draw, windows, self._options.chart)
        self.figures["picture"] = str(path)

    def _summary(self, agreed: bool, total_s: float) -> None:
        screen = self._screen
        screen.heading("Summary")
        self.figures |= {"seconds": round(total_s, 3), "python": platform.python_version()}
        write = cast("Mapping[str, float]", self.figures["write"])
        questions = cast("Mapping[str, Mapping[str, Mapping[str, float]]]", self.figures["questions"])
        lines = [("writes", f"{write['events_per_s']:,} events/s; a batch {shown(write)}")] if write["events"] else []
        for level, timings in questions.items():
            lines.append((f"{level} questions", f"{shown(timings['took'])}; age {shown(timings['age'])}"))
        lines.append(("seconds", ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._seconds.items())))
        lines += [("picture", str(self.figures["picture"])), ("in all", f"{total_s:.1f} s")]
        for name, text in lines:
            screen.say(f"{name:18} {text}")
        screen.say()
        screen.say(f"{screen.good} everything agreed" if agreed else f"{screen.bad} NOT everything agreed, see above")
        (self._options.directory / "demo.json").write_text(json.dumps(self.figures, indent=2, default=str) + "\n")

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - started


async def _report(report: ReportProgress, replay: Replay, node: Standalone, client: Client) -> None:
    """Move the bar until cancelled."""
    while True:
        await _show_progress(report, replay, node, client)
        await asyncio.sleep(PROGRESS_EVERY_S)


async def _show_progress(report: ReportProgress, replay: Replay, node: Standalone, client: Client) -> None:
    """Show how far the writing is, and how far the QueryNode's watermark lies behind the log's present."""
    stats = await retry_until(client.stats, flights.COLLECTION, consistency="eventually")
    behind_ms = max(0, node.node.clock.clock.wall_ms() - physical_ms(stats.tsafe))
    reached = f"{replay.event_time:%Y-%m-%d %H:%M}" if replay.event_time else "-"
    report(replay.done, f"{replay.rate:>9,.0f} events/s  event time {reached}  watermark {behind_ms} ms behind")
