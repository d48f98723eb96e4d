"""How Spark finds the source, and what that costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")


def python(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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
        "from tidewal.spark_bridge.local import make_source_findable\n"
        "make_source_findable()\n"
        f'print(subprocess.check_output([sys.executable, "-c", "{lists}"], text=True))'
    )
    assert python(code, tmp_path) == "True"
