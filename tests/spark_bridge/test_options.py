"""Options: what is wrong is named."""

from __future__ import annotations

import pytest

from tidewal.runtime.errors import ConfigError
from tidewal.spark_bridge.log import open_log
from tidewal.spark_bridge.options import Options

GOOD = {"wal": "rocksmq:///data", "collection": "flights"}


def test_defaults_are_those_of_sparks_kafka_source() -> None:
    batch, stream = Options.parse(GOOD, streaming=False), Options.parse(GOOD, streaming=True)
    assert (batch.starting, batch.ending) == ("earliest", "latest")
    assert stream.starting == "latest"
    assert stream.max_rows is None
    assert stream.fail_on_data_loss


def test_names_are_taken_in_any_case() -> None:
    options = Options.parse({"WAL": "w", "collection": "c", "maxrowspertrigger": "5", "FAILONDATALOSS": "False"})
    assert (options.wal, options.max_rows, options.fail_on_data_loss) == ("w", 5, False)


@pytest.mark.parametrize(
    ("change", "streaming", "key", "text"),
    [
        ({"wal": ""}, True, "wal", "required"),
        ({"collection": ""}, None, "collection", "required"),
        ({"startingoffset": "latest"}, None, "startingoffset", "known are wal, .*startingOffsets"),
        ({"maxRowsPerTrigger": "0"}, True, "maxRowsPerTrigger", "1 or more"),
        ({"maxRowsPerTrigger": "many"}, True, "maxRowsPerTrigger", "'many'"),
        ({"failOnDataLoss": "no"}, True, "failOnDataLoss", "true or false"),
        ({"endingOffsets": "latest"}, True, "endingOffsets", "spark.read only"),
        ({"maxRowsPerTrigger": "5"}, False, "maxRowsPerTrigger", "spark.readStream only"),
        ({"startingOffsets": "latest"}, False, "startingOffsets", "nothing"),
        ({"endingOffsets": "earliest"}, False, "endingOffsets", "nothing"),
    ],
)
def test_wrong_options_are_named(change: dict[str, str], streaming: bool | None, key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        Options.parse(GOOD | change, streaming=streaming)
    assert caught.value.key == key


@pytest.mark.parametrize(
    "url", ["kafka://", "woodpecker://etcd", "memory://", "rocksmq://data/dir", "rocksmq:", "/data", "rocksmq:///", ""]
)
def test_urls_that_cannot_be_read_name_what_can(url: str) -> None:
    with pytest.raises(ConfigError, match="rocksmq:///absolute/path"):
        open_log(url)
