"""A data engineer: a CSV file in, tables out that DuckDB and Spark read, and a job that exports."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.first_hour.stranger import Stranger

pytestmark = [pytest.mark.long, pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.in_turn(0, 3)]

ROWS = 5000

DUCKDB = """
import duckdb
from deltalake import DeltaTable

rows = DeltaTable("data/tables/trips/current").to_pyarrow_dataset()
print(duckdb.sql("select city, count(*), sum(km) from rows group by city order by city").fetchall())
"""

SPARK = """
import json
from pathlib import Path
from pyspark.sql import functions as F
from tidewal.spark_bridge import latest, session

spark = session("trips", **{"spark.log.level": "ERROR"})
rows = latest(spark.read.format("tidewal").option("wal", f"rocksmq://{Path('data/log').absolute()}")
              .option("collection", "trips").load())
found = rows.groupBy("city").agg(F.count("*"), F.sum("km")).orderBy("city").collect()
rows.where("city = 'Faro'").write.parquet("faro.parquet")
print("found", json.dumps([list(row) for row in found]))
spark.stop()
"""


def test_a_csv_file_becomes_tables_that_others_read(stranger: Stranger) -> None:
    if shutil.which("java") is None:
        pytest.skip("no Java")
    stranger.reads("README.md", "Tidewal", "Run it")
    stranger.installs("'tidewal[spark]' duckdb")
    stranger.reads("docs/cli.md", "Collections")
    cities = ("Faro", "Porto", "Cádiz")
    rows = [
        (number, cities[number % 3], number % 100, f"2026-01-{number % 28 + 1:02}T08:00:00") for number in range(ROWS)
    ]
    csv = "".join(f"{','.join(map(str, row))}\n" for row in rows)
    stranger.writes("trips.csv", f"id,city,km,at\n{csv}", typed=False)
    stranger.starts("tidewal run --data data").until("running")
    stranger.types(
        "tidewal create data/log trips --field id:int64 --field city:varchar --field km:int64 --field 'at:timestamp?'"
        " --primary-key id"
    )
    stranger.writes("wrong.csv", "id,city,km,at\n1,Faro,2,\n2,Porto,far,\n", typed=False)
    assert "line 3" in stranger.types("tidewal insert data/log trips wrong.csv", status=2)
    assert f"{ROWS:,}" in stranger.types("tidewal insert data/log trips trips.csv")
    stranger.types("tidewal compact data/log trips")

    expected = [
        [city, len(of_city), sum(of_city)]
        for city in sorted(cities)
        if (of_city := [km for _, each, km, _ in rows if each == city])
    ]
    stranger.reads("docs/collections.md", "The tables")
    stranger.writes("duck.py", DUCKDB)
    found = stranger.types("python duck.py")
    assert [list(row) for row in eval(found, {"Decimal": int, "__builtins__": {}})] == expected

    stranger.reads("docs/spark.md", "Sessions")
    stranger.writes("job.py", SPARK)
    (line,) = [each for each in stranger.types("python job.py").splitlines() if each.startswith("found ")]
    assert json.loads(line.partition(" ")[2]) == expected
    count = stranger.types(
        'python -c \'import duckdb; print(duckdb.sql("select count(*) from \\"faro.parquet/*.parquet\\""))\''
    )
    assert str(len([row for row in rows if row[1] == "Faro"])) in count
