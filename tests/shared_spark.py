"""One Spark session for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOGGING = """
appender.file.type = File
appender.file.name = file
appender.file.fileName = {file}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{HH:mm:ss}} %p %c: %m%n%ex
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
"""


class SharedSpark:
    """The one session: starting Java takes longer than all that is tested. What Spark logs goes to a file: tests of
    failures would bury the report under Java's traces."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "spark.log"
        self._session: SparkSession | None = None

    def session(self) -> SparkSession:
        """The session, made anew where a test or Spark itself has stopped the one before."""
        if self._session is None:
            self._session = self._start()
        return self._session

    def why_stopped(self) -> str | None:
        """What Spark logged last, if the session is stopped: whatever uses it later only fails to find the source."""
        if self._session is None or not self._is_stopped(self._session):
            return None
        self.close()
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-200:])

    @staticmethod
    def _is_stopped(session: Any) -> bool:
        java = session.sparkContext._jsc
        return java is None or java.sc().isStopped()

    def close(self) -> None:
        """Stop the session, if there is one."""
        if self._session is not None:
            self._session.stop()
            self._session = None

    def _start(self) -> SparkSession:
        from tidewal.spark_bridge import session  # here, for tests without Spark need not import it

        made = session(
            "tests",
            **{
                "spark.local.dir": str(self._folder / "local"),
                "spark.sql.warehouse.dir": str(self._folder / "warehouse"),
                "spark.sql.artifact.isolation.enabled": "false",
            },
        )
        settings = self._folder / "log4j2.properties"
        settings.write_text(LOGGING.format(file=self._log), encoding="utf-8")
        java: Any = made.sparkContext._jvm
        java.org.apache.logging.log4j.core.config.Configurator.reconfigure(java.java.net.URI(settings.as_uri()))
        return made


@pytest.fixture(scope="session")
def shared_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedSpark]:
    pytest.importorskip("pyspark")
    shared = SharedSpark(tmp_path_factory.mktemp("spark"))
    yield shared
    shared.close()


@pytest.fixture
def spark(shared_spark: SharedSpark) -> Iterator[SparkSession]:
    """The session all tests share. What a failed test has left running is stopped."""
    made = shared_spark.session()
    yield made
    if (log := shared_spark.why_stopped()) is not None:
        pytest.fail(f"the session that all tests share was stopped:\n{log}")
    for query in made.streams.active:
        query.stop()
