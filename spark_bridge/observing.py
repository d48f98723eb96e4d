"""How the streaming queries of a driver get on, in Tidewal's table of metrics, and at `/metrics`.

Nothing here asks for more than Spark's own query progress, so it works in any session, with Spark Connect in the
client.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING
from weakref import WeakSet

from ..runtime.metrics import Metrics
from ..runtime.metrics_server import MetricsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .listener import QueryMetrics


_with_another: WeakSet[SparkSession] = WeakSet()


def observe(spark: SparkSession, metrics: Metrics) -> QueryMetrics:
    """Write the progress of all streaming queries of `spark` into `metrics`, under the names that begin with `spark_`.

    Numbers change when a micro-batch ends, some seconds later at most: Spark tells of it beside the query. Queries
    that run already are seen too. A query is labelled with its name, or else its id; when it ends its series go, and
    `spark_query_ended_total` says how. `stop_observing` ends it.
    """
    from .listener import QueryMetrics

    listener = QueryMetrics(metrics)
    spark.streams.addListener(listener)
    for query in spark.streams.active:
        listener.started(str(query.runId), query.name or str(query.id))
    return listener


def stop_observing(spark: SparkSession, listener: QueryMetrics) -> None:
    """End what `observe` has begun.

    Over Spark Connect a listener that does nothing stays in the session: PySpark 4.2 takes the last one away with a
    lock in hand that the next event waits for, and waits for that event.
    """
    from .listener import Idle

    if type(spark).__module__.startswith("pyspark.sql.connect") and spark not in _with_another:
        spark.streams.addListener(Idle())
        _with_another.add(spark)
    spark.streams.removeListener(listener)


def progress(spark: SparkSession, *, name: str = "spark", host: str = "127.0.0.1", port: int = 0) -> Progress:
    """Serve `/metrics` and `/healthz` for the streaming queries of `spark` from this process, until it is closed:

        with progress(spark, port=9092) as told:
            print(told.url)

    `name` becomes the label `node_id`; port 0 takes a free one. Nobody is asked who he is: leave `host` at loopback,
    or keep strangers out by other means. Raises `Unavailable` where the address cannot be taken.
    """
    return Progress(spark, name, host, port)


class Progress:
    """A driver's endpoint; see `progress`. `/healthz` is 503 once a query has failed that was not started again."""

    def __init__(self, spark: SparkSession, name: str, host: str, port: int) -> None:
        self.metrics = Metrics(name)
        self._spark = spark
        self._listener = observe(spark, self.metrics)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tidewal-spark-metrics", daemon=True)
        self._thread.start()
        self._server = MetricsServer(self.metrics, self._listener.health, host=host, port=port)
        self._closed = False
        try:
            asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Where Prometheus finds it."""
        host, port = self._server.address
        return f"http://{host}:{port}/metrics"

    def close(self) -> None:
        """Stop serving and observing. May be called twice."""
        if self._closed:
            return
        self._closed = True
        stop_observing(self._spark, self._listener)
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
