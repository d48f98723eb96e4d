"""A Spark session on this machine that starts fast and stays small."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Final

from ..runtime.errors import Unsupported

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Measured: the compiler and collector flags halve the time to the first result; the checkpoint manager halves the
# fixed cost of a micro-batch, because Hadoop's default one starts about 20 processes for each; over TCP each task waits
# 40 ms for its Python worker, because Spark leaves Nagle's algorithm on.
SETTINGS: Final[dict[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
}


def session(app_name: str = "tidewal", *, master: str = "local[2]", **conf: str) -> SparkSession:
    """The running Spark session, or a new one with `SETTINGS`; `conf` adds to them and overrides them, as in
    `session(**{"spark.driver.memory": "4g", "spark.log.level": "ERROR"})`. What concerns the driver's Java counts for
    the first session of a process only.

    Workers get this Python. `SETTINGS` suit one machine with a local disk for checkpoints: for a cluster make the
    session yourself. Raises `Unsupported` when PySpark or Java is missing.
    """
    require_spark()
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    make_source_findable()
    builder = SparkSession.builder.master(master).appName(app_name)
    for name, value in (SETTINGS | conf).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def require_spark() -> None:
    """Raise `Unsupported`, which says what to install, when PySpark or Java is missing."""
    if find_spec("pyspark") is None:
        raise Unsupported("PySpark is missing: pip install 'tidewal[spark]'", capability="spark")
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        raise Unsupported("Java is missing: install a JDK 17 or newer, or set JAVA_HOME", capability="spark")


def make_source_findable() -> None:
    """Spark lists the modules on `sys.path`. An editable install is not there, so its folder is added for workers."""
    if any(module.name == "pyspark_tidewal" for module in iter_modules()):
        return
    spec = find_spec("pyspark_tidewal")
    if spec is None or spec.origin is None:
        raise Unsupported("module pyspark_tidewal is missing: install tidewal again", capability="spark")
    folders = [str(Path(spec.origin).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
