"""A Spark session on this machine that starts fast and stays small."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Final, cast

from ...runtime.errors import Unsupported
from ...runtime.extras import install_command

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

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
    `session(**{"spark.driver.memory": "4g", "spark.log.level": "ERROR"})`. Settings of the driver's JVM take effect in
    the first session of a process only.

    Workers get this Python. `SETTINGS` suit one machine with a local disk for checkpoints: for a cluster make the
    session yourself. Raises `Unsupported` when PySpark or Java is missing.
    """
    require_spark()
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    leave_out_the_zip()
    make_source_findable()
    builder = SparkSession.builder.master(master).appName(app_name)
    for name, value in (SETTINGS | conf).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    make_source_known(spark)
    return spark


def require_spark() -> None:
    """Raise `Unsupported`, which says what to install, when PySpark or Java is missing."""
    if find_spec("pyspark") is None:
        raise Unsupported(f"PySpark is missing: {install_command('spark')}", capability="spark")
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


def make_source_known(spark: SparkSession) -> None:
    """Register the source where Spark has not found it. Spark looks for sources once per JVM: when the Python worker
    that looks is late, on a busy machine, Spark keeps an empty list, and raises `DATA_SOURCE_NOT_FOUND` from then on.
    A source that Spark has found is not registered again, since Spark would warn of that for each query."""
    from ..source import TidewalSource

    sources = cast(Any, spark)._jsparkSession.sessionState().dataSourceManager()
    if not sources.dataSourceExists(TidewalSource.name()):
        spark.dataSource.register(TidewalSource)


def leave_out_the_zip() -> None:
    """Have workers import the installed PySpark. Spark hands them a zip of it, and a zip has no bytecode: each worker
    would spend a second on compiling, and Spark waits at most ten seconds for some of them, also on a busy machine.
    Does nothing where PySpark is not all in its package, or a Spark home is set."""
    import pyspark

    installed = Path(pyspark.__file__).parent
    if "SPARK_HOME" not in os.environ and (installed / "jars").is_dir():
        os.environ["SPARK_HOME"] = _home_without_zip(installed).name


@cache
def _home_without_zip(installed: Path) -> TemporaryDirectory[str]:
    """All of `installed` but the folder with the zip. It is removed when this process ends."""
    home = tempfile.TemporaryDirectory(prefix="tidewal-spark-home-")
    for entry in installed.iterdir():
        if entry.name != "python":
            Path(home.name, entry.name).symlink_to(entry)
    return home
