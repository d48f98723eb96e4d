"""What `tidewal config` shows of the settings: where each value comes from, and nothing that is secret."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tidewal.runtime.config.described import DescribedSetting, canonical_key, described_settings
from tidewal.runtime.config.loading import known_keys
from tidewal.runtime.errors import ConfigError

SECRET = "hunter2"


def described(
    path: Path | None = None, environment: dict[str, str] | None = None, **arguments: object
) -> dict[str, DescribedSetting]:
    found = described_settings(path, environment=environment or {}, arguments=arguments)
    return {each.key: each for each in found}


def test_every_setting_is_there_and_says_what_it_is():
    found = described()
    assert list(found) == list(known_keys())
    assert all(each.meaning and each.type and each.source == "default" for each in found.values())
    assert all(each.value == each.default for each in found.values())
    assert "<class" not in "".join(each.type for each in found.values())


def test_each_value_names_the_source_that_counts(tmp_path: Path):
    path = tmp_path / "node.yaml"
    path.write_text("mq: {mqBufSize: 1, pursuitLag: 2}\nmetrics: {port: 3}\nproxy: {maxShardNum: 4}")
    found = described(
        path, {"TIDEWAL__MQ__PURSUITLAG": "20", "TIDEWAL__METRICS__PORT": "30"}, metrics={"port": 300, "host": None}
    )
    values = {
        key: (found[key].value, found[key].source)
        for key in ("mq.mqBufSize", "mq.pursuitLag", "metrics.port", "metrics.host", "proxy.maxShardNum")
    }
    assert values == {
        "mq.mqBufSize": (1, str(path)),
        "mq.pursuitLag": (20.0, "environment variable TIDEWAL__MQ__PURSUITLAG"),
        "metrics.port": (300, "arguments"),
        "metrics.host": ("127.0.0.1", "default"),
        "proxy.maxShardNum": (4, str(path)),
    }


def test_a_section_of_free_keys_is_one_setting_with_all_its_sources(tmp_path: Path):
    path = tmp_path / "node.yaml"
    path.write_text("kafka: {producer: {linger.ms: 5}}")
    found = described(path, {"TIDEWAL__KAFKA__PRODUCER__ACKS": "all", "TIDEWAL__KAFKA__BROKERLIST": "a:1"})
    producer = found["kafka.producer.*"]
    assert producer.value == {"linger.ms": "***", "ACKS": "***"}
    assert producer.source == f"{path}, environment variable TIDEWAL__KAFKA__PRODUCER__ACKS"
    assert found["kafka.consumer.*"].source == "default"


def test_nothing_secret_is_described():
    found = described(
        environment={
            "TIDEWAL__WAL": f"pulsar://user:{SECRET}@broker:6650/public/default?token={SECRET}",
            "TIDEWAL__KAFKA__SASLPASSWORD": SECRET,
            "TIDEWAL__KAFKA__BROKERLIST": f"user:{SECRET}@broker:9092",
            "TIDEWAL__KAFKA__PRODUCER__SASL.PASSWORD": SECRET,
            "TIDEWAL__PULSAR__AUTHPARAMS": f"token:{SECRET}",
        }
    )
    text = json.dumps([asdict(each) for each in found.values()])
    assert SECRET not in text
    assert found["wal"].value == "pulsar://***@broker:6650/public/default?token=***"
    assert (found["kafka.saslPassword"].value, found["kafka.saslPassword"].default) == ("***", "")


@pytest.mark.parametrize(
    ("key", "type_"),
    [
        ("mq.mqBufSize", "integer > 0"),
        ("metrics.port", "integer ≥ 0 ≤ 65535"),
        ("woodpecker.storage.type", "one of minio, local, service"),
        ("kafka.saslPassword", "text, secret"),
        ("common.preCreatedTopic.names", "list of texts"),
    ],
)
def test_the_type_is_said_in_words(key: str, type_: str):
    assert described()[key].type == type_


@pytest.mark.parametrize(
    ("key", "known"),
    [
        ("mq.mqBufSize", "mq.mqBufSize"),
        ("MQ.MQBUFSIZE", "mq.mqBufSize"),
        ("kafka.producer.linger.ms", "kafka.producer.*"),
        ("kafka.producer.*", "kafka.producer.*"),
    ],
)
def test_a_key_is_found_without_regard_to_case(key: str, known: str):
    assert canonical_key(key) == known
    assert known in described()


def test_a_key_that_there_is_not_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown setting 'mq\.mqBufSiz'; the nearest known one is 'mq\.mqBufSize'"):
        canonical_key("mq.mqBufSiz")
    with pytest.raises(ConfigError, match="a setting of Milvus without a meaning"):
        canonical_key("etcd.endpoints")
