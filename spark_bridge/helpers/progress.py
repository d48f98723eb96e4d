"""The progress of a driver's streaming queries as Tidewal's metrics, and at `/metrics`.

Nothing here needs more than Spark's own query progress, so it works in any session, with Spark Connect in the
client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from ...runtime.log.loop_thread import LoopThread
from ...runtime.metrics.metrics import Metrics
from ...runtime.metrics.server import MetricsServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .listener import QueryMetrics


_with_idle_listener: WeakSet[SparkSession] = WeakSet()


def observe(spark: SparkSession, metrics: Metrics) -> QueryMetrics:
    """Write the progress of all streaming queries of `spark` into `metrics`, under the names that begin with `spark_`.

    Metrics change some seconds at most after a micro-batch ends: Spark reports it beside the query. Queries that run
    already are included. A query is labelled with its name, or else its id; when it ends its series are removed, and
    `spark_query_ended_total` counts how it ended. `stop_observing` with the returned listener ends this.
    """
    from .listener import QueryMetrics

    listener = QueryMetrics(metrics)
    spark.streams.addListener(listener)
    for query in spark.streams.active:
        listener.started(str(query.runId), query.name or str(query.id))
    return listener


def stop_observing(spark: SparkSession, listener: QueryMetrics) -> None:
    """End what `observe`, which returned `listener`, has begun.

    Over Spark Connect a listener that does nothing stays in the session: PySpark 4.2 removes the last one
    while it holds a lock that the next event waits for, and waits for that event.
    """
    from .listener import Idle

    if type(spark).__module__.startswith("pyspark.sql.connect") and spark not in _with_idle_listener:
        spark.streams.addListener(Idle())
        _with_idle_listener.add(spark)
    spark.streams.removeListener(listener)


def progress(spark: SparkSession, *, name: str = "spark", host: str = "127.0.0.1", port: int = 0) -> ProgressEndpoint:
    """Serve `/metrics` and `/healthz` for the streaming queries of `spark` from this process, until it is closed:

        with progress(spark, port=9092) as endpoint:
            print(endpoint.url)

    `name` becomes the label `node_id`; port 0 takes a free one. The endpoint has no authentication: leave `host` at
    loopback, or restrict access by other means. Raises `Unavailable` where the address cannot be taken.
    """
    return ProgressEndpoint(spark, name, host, port)


class ProgressEndpoint:
    """The endpoint of a driver, made by `progress`. `/healthz` is 503 once a query has failed that was not started
    again."""

    def __init__(self, spark: SparkSession, name: str, host: str, port: int) -> None:
        self.metrics: Metrics = Metrics(name)
        self._spark = spark
        self._listener = observe(spark, self.metrics)
        self._loop = LoopThread("tidewal-spark-metrics")
        self._server = MetricsServer(self.metrics, self._listener.health, host=host, port=port)
        self._closed = False
        try:
            self._loop.run(self._server.start())
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """The URL of `/metrics`."""
        host, port = self._server.address
        return f"http://{host}:{port}/metrics"

    def close(self) -> None:
        """Stop serving and observing. May be called twice."""
        if self._closed:
            return
        self._closed = True
        stop_observing(self._spark, self._listener)
        self._loop.run(self._server.stop())
        self._loop.end()

    def __enter__(self) -> ProgressEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
