"""How Spark finds the source, and what that costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")


def python(code: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_looking_for_sources_imports_nothing_heavy(tmp_path: Path) -> None:
    added = python(
        "import sys, pyspark.sql.datasource, pyspark.sql.streaming.datasource\n"
        "before = set(sys.modules)\n"
        "import pyspark_tidewal\n"
        "assert pyspark_tidewal.DefaultSource.name() == 'tidewal'\n"
        "added = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(added - set(sys.stdlib_module_names)))",
        tmp_path,
    )
    assert [name for name in added.split() if not name.startswith("__editable__")] == ["pyspark_tidewal", "tidewal"]


def test_without_spark_the_module_imports_and_offers_nothing(tmp_path: Path) -> None:
    code = "import sys; sys.modules['pyspark'] = None\nimport pyspark_tidewal; print(pyspark_tidewal.__all__)"
    assert python(code, tmp_path) == "[]"


def test_workers_of_a_session_find_the_source_from_any_folder(tmp_path: Path) -> None:
    lists = "import pkgutil; print('pyspark_tidewal' in [module.name for module in pkgutil.iter_modules()])"
    code = (
        "import subprocess, sys\n"
        "from tidewal.spark_bridge.helpers.spark_session import make_source_findable\n"
        "make_source_findable()\n"
        f'print(subprocess.check_output([sys.executable, "-c", "{lists}"], text=True))'
    )
    assert python(code, tmp_path) == "True"


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
def test_a_session_knows_the_source_though_spark_has_looked_for_sources_in_vain(tmp_path: Path) -> None:
    """What a late worker does to the one search for sources, a module does that cannot be imported."""
    (tmp_path / "pyspark_broken.py").write_text("raise RuntimeError('no source here')")
    told = python(
        "from pyspark.sql import SparkSession\n"
        "from tidewal.spark_bridge import session\n"
        "from tidewal.spark_bridge.helpers.spark_session import SETTINGS\n"
        "def said_by(spark):\n"
        "    try:\n"
        "        spark.read.format('tidewal').load()\n"
        "    except Exception as error:\n"
        "        return 'DATA_SOURCE_NOT_FOUND' in str(error), 'option wal is required' in str(error)\n"
        "settings = SETTINGS | {'spark.log.level': 'OFF'}\n"
        "spark = SparkSession.builder.master('local[1]').config(map=settings).getOrCreate()\n"
        "print(said_by(spark), said_by(session()))\n"
        "spark.stop()",
        tmp_path,
        PYSPARK_PYTHON=sys.executable,
        PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    assert told == "(True, False) (False, True)"


@pytest.mark.spark
def test_workers_import_pyspark_where_it_is_compiled(spark: Any) -> None:
    [where] = spark.sparkContext.parallelize([0], 1).map(lambda _: __import__("pyspark").__file__).collect()
    assert ".zip" not in where
