"""Start Spark for a command, end it in good order, and raise its failures as Tidewal's errors."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import typer

from ..runtime import errors
from ..runtime.errors import TidewalError, Unavailable, Unsupported
from ..runtime.signals import INTERRUPTED, SIGNALS
from ..spark_bridge import session
from ..spark_bridge.helpers.jdk import MINIMAL_JAVA, find_java
from ..spark_bridge.helpers.spark_session import require_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

ASKED_EVERY_S = 0.2  # how often a running query is asked whether it has ended

_OURS = re.compile(r"tidewal\.runtime\.errors\.(\w+): ([^\n]+)")


@contextmanager
def spark_session(name: str, master: str, conf: Mapping[str, str]) -> Generator[SparkSession]:
    """A Spark session for one command. One that runs in this process already is used, and left running.

    What Spark raises comes out as a typed error. Raises `Unsupported` when PySpark or Java is missing or too old.
    """
    java = find_java()
    if java is not None and not java.suffices:
        raise Unsupported(
            f"Spark needs a JDK {MINIMAL_JAVA} or newer, found only {java.version} in {java.home}: set JAVA_HOME",
            capability="spark",
        )
    if java is not None:
        os.environ["JAVA_HOME"] = str(java.home)
    require_spark()
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    try:
        # An error is printed once, by this command.
        spark = running or session(f"tidewal spark {name}", master=master, **{"spark.log.level": "OFF", **conf})
        yield spark
    except (PySparkException, Py4JError) as error:
        raise _tidewal_error(str(error)) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        started = SparkSession.getActiveSession()
        if running is None and started is not None:
            started.stop()


def _tidewal_error(text: str) -> TidewalError:
    """The error of Tidewal in Spark's text; else `Unavailable` with the first line of that."""
    ours = _OURS.search(text)
    kind = getattr(errors, ours[1], None) if ours else None
    if ours and isinstance(kind, type) and issubclass(kind, TidewalError):
        return kind(ours[2])
    lines = [line for line in text.splitlines() if line.strip()]
    return Unavailable(f"Spark failed: {lines[0] if lines else 'it does not say why'}")


def until_ended(query: StreamingQuery) -> None:
    """Wait for the end of `query`. SIGINT or SIGTERM stop it between two calls to Java, so that none is interrupted,
    and raise `typer.Exit`; a second signal ends this process at once."""
    asked: list[int] = []

    def stop(number: int, _: object) -> None:
        asked.append(number)
        signal.signal(number, signal.SIG_DFL)

    with _handling(stop):
        while not query.awaitTermination(cast(Any, ASKED_EVERY_S)):  # fractions are fine, whatever its types say
            if asked:
                query.stop()
                raise typer.Exit(INTERRUPTED)


@contextmanager
def _handling(handler: Callable[[int, object], None]) -> Generator[None]:
    before = {each: signal.signal(each, handler) for each in SIGNALS}
    try:
        yield
    finally:
        for each, was in before.items():
            signal.signal(each, was)
