"""Spark finds the data source `tidewal` through this module's name: it imports every `pyspark_*` module and takes its
`DefaultSource`. So this must be quick, and must not fail where Spark is missing.
"""

from importlib.util import find_spec

__all__: list[str] = []

if find_spec("pyspark") is not None:
    from tidewal.spark_bridge.source import TidewalSource as DefaultSource

    __all__ += ["DefaultSource"]
