"""Precedence of sources, unknown keys, and which log the settings choose."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from tidewal.runtime.config.loading import known_keys, load_settings, resolve_mq_type, url_of, wal_options, wal_url
from tidewal.runtime.errors import ConfigError, PositionMismatch, Unavailable
from tidewal.runtime.log.opening import open_wal

SWITCHES = {
    "rocksmq.path": "/log",
    "pulsar.address": "localhost",
    "kafka.brokerList": "localhost:9092",
    "woodpecker.meta.type": "etcd",
}


def settings_with(enabled: tuple[int, int, int, int], **other: object):
    switches = {key: value if on else "" for (key, value), on in zip(SWITCHES.items(), enabled, strict=True)}
    return load_settings(environment={}, arguments={**switches, **other})


@pytest.mark.parametrize(
    ("standalone", "enabled", "expected"),
    [
        (True, (1, 1, 1, 1), "rocksmq"),
        (True, (0, 1, 1, 1), "pulsar"),
        (True, (0, 0, 1, 1), "kafka"),
        (True, (0, 0, 0, 1), "woodpecker"),
        (False, (1, 1, 1, 1), "pulsar"),
        (False, (0, 1, 1, 1), "pulsar"),
        (False, (0, 0, 1, 1), "kafka"),
        (False, (0, 0, 0, 1), "woodpecker"),
        (False, (1, 0, 0, 1), "woodpecker"),
    ],
)
def test_default_takes_the_first_enabled(standalone: bool, enabled: tuple[int, int, int, int], expected: str):
    settings = settings_with(enabled)
    assert resolve_mq_type(settings, standalone) == expected
    assert settings.mq.type == "default"  # what was resolved is not written back


@pytest.mark.parametrize(
    ("standalone", "enabled"), [(True, (0, 0, 0, 0)), (False, (0, 0, 0, 0)), (False, (1, 0, 0, 0))]
)
def test_nothing_enabled_is_an_error(standalone: bool, enabled: tuple[int, int, int, int]):
    with pytest.raises(ConfigError, match="no log is enabled"):
        resolve_mq_type(settings_with(enabled), standalone)


@pytest.mark.parametrize("name", ["rocksmq", "pulsar", "kafka", "woodpecker"])
def test_explicit_type_wins(name: str):
    assert resolve_mq_type(settings_with((1, 1, 1, 1), **{"mq.type": name}), standalone=True) == name


def test_rocksmq_in_a_cluster_is_an_error():
    with pytest.raises(ConfigError, match="embedded"):
        resolve_mq_type(settings_with((1, 1, 1, 1), **{"mq.type": "rocksmq"}), standalone=False)


def test_unknown_type_is_an_error():
    with pytest.raises(ConfigError, match=r"mq\.type"):
        settings_with((1, 1, 1, 1), **{"mq.type": "natsmq"})


@pytest.mark.parametrize(
    ("storage", "force", "permitted"),
    [("minio", False, True), ("service", False, True), ("local", True, True), ("local", False, False)],
)
@pytest.mark.parametrize("mq_type", ["default", "woodpecker"])
def test_woodpecker_storage_in_a_cluster(mq_type: str, storage: str, force: bool, permitted: bool):
    keys = {"woodpecker.storage.type": storage, "woodpecker.storage.forceLocalStorage": force, "mq.type": mq_type}
    settings = settings_with((0, 0, 0, 1), **keys)
    assert resolve_mq_type(settings, standalone=True) == "woodpecker"
    if permitted:
        assert resolve_mq_type(settings, standalone=False) == "woodpecker"
    else:
        with pytest.raises(ConfigError, match="forceLocalStorage"):
            resolve_mq_type(settings, standalone=False)


def test_wal_url_overrides_mq_type_and_a_checkpoint_overrides_both():
    settings = settings_with((1, 1, 1, 1), **{"mq.type": "kafka", "wal": "memory://"})
    assert resolve_mq_type(settings, standalone=False) == "memory"
    assert resolve_mq_type(settings, standalone=False, checkpoint_wal_name="pulsar") == "pulsar"


@pytest.mark.parametrize(
    ("where", "url"),
    [
        ("/var/a log", "rocksmq:///var/a%20log"),
        ("data/log", "rocksmq:///here/data/log"),
        (".", "rocksmq:///here"),
        ("./a:b", "rocksmq:///here/a%3Ab"),
        ("kafka://h:1/p", "kafka://h:1/p"),
        ("h:1", "h:1"),
        ("", ""),
    ],
)
def test_a_path_is_the_directory_of_an_embedded_log(where: str, url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.getcwd", lambda: "/here")
    assert url_of(where) == url


def test_wal_without_a_scheme_is_an_error():
    with pytest.raises(ConfigError, match="no URL"):
        resolve_mq_type(settings_with((1, 1, 1, 1), wal="/var/lib/log"), standalone=True)


def test_each_source_overrides_the_one_below(tmp_path):
    file = tmp_path / "tidewal.yaml"
    file.write_text("rocksmq: {path: file, retentionSizeInMB: 1, segmentSizeInMB: 1}\nproxy.timeTickInterval: 7\n")
    settings = load_settings(
        file,
        environment={
            "TIDEWAL__ROCKSMQ__RETENTIONSIZEINMB": "2",
            "TIDEWAL__ROCKSMQ__SEGMENTSIZEINMB": "2",
            "PATH": "not ours",
        },
        arguments={"rocksmq": {"segmentSizeInMB": 3}},
    )
    rocksmq = settings.rocksmq
    assert (rocksmq.path, rocksmq.retention_size_in_mb, rocksmq.segment_size_in_mb) == ("file", 2, 3)
    assert settings.proxy.time_tick_interval == 7
    assert rocksmq.free_space_in_mb == 64


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("TIDEWAL__METRICS__PORT", "9091")
    assert load_settings().metrics.port == 9091


def test_a_variable_with_too_few_underscores_is_ignored_with_a_warning_that_names_the_right_one(caplog):
    names = ("TIDEWAL_METRICS_PORT", "TIDEWAL_ROCKSMQ__SEGMENTSIZEINMB", "TIDEWAL_TEST_KAFKA", "TIDEWAL_METRIC_PORT")
    assert load_settings(environment=dict.fromkeys(names, "1")) == load_settings(environment={})
    assert [record.getMessage() for record in caplog.records] == [
        "the environment variable TIDEWAL_METRICS_PORT is ignored: the setting metrics.port is TIDEWAL__METRICS__PORT",
        "the environment variable TIDEWAL_ROCKSMQ__SEGMENTSIZEINMB is ignored: the setting rocksmq.segmentSizeInMB is "
        "TIDEWAL__ROCKSMQ__SEGMENTSIZEINMB",
    ]


def test_null_means_not_given(tmp_path):
    file = tmp_path / "tidewal.yaml"
    file.write_text("kafka:\n  brokerList:\npulsar:\n")
    assert load_settings(file, environment={}) == load_settings(environment={})


def test_kafka_client_keys_pass_through_with_their_case_and_dots():
    settings = load_settings(
        environment={"TIDEWAL__KAFKA__CONSUMER__fetch_max_bytes": "5"},
        arguments={"kafka": {"producer": {"client.id": "dc", "Linger": 1}}},
    )
    assert settings.kafka.consumer == {"fetch_max_bytes": "5"}
    assert settings.kafka.producer == {"client.id": "dc", "Linger": "1"}


def test_unknown_key_names_itself_its_source_and_the_nearest():
    with pytest.raises(ConfigError) as caught:
        load_settings(environment={"TIDEWAL__ROCKSMQ__PAHT": "/x"})
    assert caught.value.key == "ROCKSMQ.PAHT"
    assert caught.value.nearest == "rocksmq.path"
    assert "TIDEWAL__ROCKSMQ__PAHT" in caught.value.message


@pytest.mark.parametrize("key", ["rocksmq", "rocksmq.path.deeper", "kafka.consumerr.x", ""])
def test_a_section_is_no_key(key: str):
    with pytest.raises(ConfigError, match="unknown setting"):
        load_settings(environment={}, arguments={key: "x"})


def test_milvus_keys_without_a_meaning_warn_once_and_change_nothing(tmp_path, caplog):
    file = tmp_path / "milvus.yaml"
    file.write_text(
        "etcd: {endpoints: 'localhost:2379'}\n"
        "mq: {type: default, ignoreBadPosition: true}\n"
        "rocksmq: {compressionTypes: [0, 0, 7, 7, 7]}\n"
        "quotaAndLimits: {dml: {insertRate: {collection: {max: -1}}}}\n"
    )
    with caplog.at_level(logging.WARNING):
        settings = load_settings(file, environment={})
    assert settings == load_settings(environment={})
    (record,) = caplog.records
    for key in ("etcd.endpoints", "mq.ignoreBadPosition", "rocksmq.compressionTypes"):
        assert key in record.getMessage()
    assert "mq.type" not in record.getMessage()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("proxy.timeTickInterval", "soon"),
        ("proxy.timeTickInterval", 0),
        ("metrics.port", 70000),
        ("streaming.walRateLimit.appendRate.slowdownThreshold", "32x"),
        ("queryNode.scheduler.maxTimestampLag", "0.0.6"),
        ("kafka.ssl.enabled", "perhaps"),
    ],
)
def test_a_value_that_does_not_fit_names_key_and_source(key: str, value: object):
    with pytest.raises(ConfigError) as caught:
        load_settings(environment={}, arguments={key: value})
    assert caught.value.key == key
    assert f"{key} (arguments)" in caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("streaming.walRateLimit.nodeMemory.slowdownThreshold", 0.95),
        ("quotaAndLimits.limitWriting.memProtection.queryNodeMemoryHighWaterLevel", 0.5),
    ],
)
def test_a_low_water_mark_is_not_above_the_high_one(key: str, value: float):
    with pytest.raises(ConfigError, match="is above"):
        load_settings(environment={}, arguments={key: value})


def test_a_rate_may_be_what_a_milvus_yaml_has(tmp_path):
    file = tmp_path / "milvus.yaml"
    file.write_text(
        "streaming: {walRateLimit: {defaultBurst: 20m, appendRate: {slowdownThreshold: 32m, recoverThreshold: 28m}}}\n"
        "quotaAndLimits: {limitWriting: {memProtection: {dataNodeMemoryLowWaterLevel: 0.85}}}\n"
    )
    assert load_settings(file, environment={}) == load_settings(environment={})
    for written, bytes in [("1m", 1 << 20), ("512kb", 1 << 19), ("2 GB", 2 << 30), (7, 7), ("7", 7)]:
        given = {"streaming.walRateLimit.appendRate.slowdownThreshold": written}
        found = load_settings(environment={}, arguments=given).streaming.wal_rate_limit.append_rate
        assert found.slowdown_threshold == bytes


@pytest.mark.parametrize("content", ["- a list", "key: [unclosed", b"\xff\xfe\xfa"])
def test_a_broken_file_is_a_config_error(tmp_path, content: str | bytes):
    file = tmp_path / "broken.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_settings(file, environment={})


def test_a_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings(tmp_path / "absent.yaml", environment={})


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("mq.type", "default"),
        ("mq.mq_buf_size", 16),
        ("rocksmq.retention_size_in_mb", 8192),
        ("kafka.broker_list", ""),
        ("kafka.read_timeout", 10.0),
        ("pulsar.address", "localhost"),
        ("pulsar.port", 6650),
        ("pulsar.webport", 80),
        ("pulsar.max_message_size", 2097152),
        ("pulsar.tenant", "public"),
        ("pulsar.namespace", "default"),
        ("pulsar.request_timeout", 60.0),
        ("woodpecker.meta.type", "etcd"),
        ("woodpecker.meta.prefix", "woodpecker"),
        ("woodpecker.storage.type", "minio"),
        ("msg_channel.chan_name_prefix.cluster", "by-dev"),
        ("root_coord.dml_channel_num", 16),
        ("proxy.time_tick_interval", 200),
        ("proxy.max_shard_num", 16),
        ("common.graceful_time", 5000),
        ("query_node.scheduler.max_timestamp_lag", 86400),
        ("quota_and_limits.limit_writing.force_deny", False),
        ("rocksmq.retention_time_in_minutes", 20160),  # two weeks; Milvus keeps three days
    ],
)
def test_defaults_are_those_of_milvus_unless_the_design_differs(key: str, default: object):
    value: object = load_settings(environment={})
    for part in key.split("."):
        value = getattr(value, part)
    assert value == default


def test_secrets_do_not_print():
    settings = load_settings(environment={}, arguments={"kafka.saslPassword": "hunter2"})
    assert "hunter2" not in repr(settings)
    assert settings.kafka.sasl_password.get_secret_value() == "hunter2"


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load_settings(environment={}).mq.type = "kafka"


def test_every_known_key_is_accepted_from_the_environment():
    """A key that `known_keys` names and the loader refuses, or one spelled twice, fails here."""
    keys = [key for key in known_keys() if not key.endswith(".*")]
    assert len({key.lower() for key in keys}) == len(keys)
    plain = load_settings(environment={}).model_dump(by_alias=True)
    for key in keys:
        value: object = plain
        for part in key.split("."):
            value = value[part]
        value = ",".join(value) if isinstance(value, tuple) else value
        text = str(value.get_secret_value() if hasattr(value, "get_secret_value") else value)
        name = "TIDEWAL__" + key.upper().replace(".", "__")
        assert load_settings(environment={name: text}) == load_settings(environment={})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"wal": "rocksmq:///elsewhere"}, "rocksmq:///elsewhere"),
        ({"rocksmq.path": "/data/my log"}, "rocksmq:///data/my%20log"),
        ({"rocksmq.path": "", "pulsar.address": "pulsar+ssl://b:1"}, "pulsar+ssl://b:1"),
        ({"rocksmq.path": "", "pulsar.address": "b", "pulsar.port": 7}, "pulsar://b:7"),
        ({"mq.type": "kafka", "kafka.brokerList": "a:1,b:2"}, "kafka://a:1,b:2"),
    ],
)
def test_the_url_of_the_log(given: dict[str, object], expected: str):
    assert wal_url(load_settings(environment={}, arguments=given)) == expected


@pytest.mark.parametrize("name", ["rocksmq", "kafka", "pulsar", "woodpecker"])
def test_a_type_without_an_address_is_an_error(name: str):
    (key,) = [key for key in SWITCHES if key.startswith(name)]
    with pytest.raises(ConfigError, match=f"set {re.escape(key)}"):
        wal_url(settings_with((0, 0, 0, 0), **{"mq.type": name}))


async def test_a_woodpecker_without_a_sidecar_says_what_to_start(tmp_path: Path):
    url = wal_url(settings_with((0, 0, 0, 1), **{"woodpecker.sidecar.directory": str(tmp_path)}))
    with pytest.raises(Unavailable, match=r"woodpecker\.sidecar\.binary"):
        await open_wal(url, failover_s=0)


@pytest.mark.parametrize(
    ("enabled", "other", "checkpoint", "expected"),
    [
        ((1, 1, 1, 0), {}, "rocksmq", "rocksmq:///log"),
        ((1, 1, 1, 0), {}, "pulsar", "pulsar://localhost:6650"),
        ((1, 1, 1, 0), {"mq.type": "pulsar"}, "kafka", "kafka://localhost:9092"),
        ((1, 1, 1, 0), {"wal": "kafka://a:1/mine"}, "kafka", "kafka://a:1/mine"),
        ((1, 1, 1, 0), {"wal": "pulsar+ssl://a:1"}, "pulsar", "pulsar+ssl://a:1"),
    ],
)
def test_a_log_goes_on_where_its_checkpoint_is(enabled, other: dict[str, object], checkpoint: str, expected: str):
    settings = settings_with(enabled, **other)
    before = settings.model_dump()
    assert wal_url(settings, checkpoint_wal_name=checkpoint) == expected
    assert settings.model_dump() == before


@pytest.mark.parametrize(
    ("enabled", "other", "checkpoint", "configured"),
    [
        ((1, 0, 0, 0), {}, "kafka", "rocksmq"),
        ((1, 1, 1, 1), {"wal": "kafka://a:1"}, "rocksmq", "kafka"),
        ((0, 0, 1, 0), {}, "memory", "kafka"),
    ],
)
def test_a_checkpoint_of_a_log_that_the_settings_do_not_lead_to_is_refused(
    enabled, other: dict[str, object], checkpoint: str, configured: str
):
    with pytest.raises(PositionMismatch) as caught:
        wal_url(settings_with(enabled, **other), checkpoint_wal_name=checkpoint)
    assert (caught.value.expected, caught.value.found) == (configured, checkpoint)
    assert checkpoint in caught.value.message
    assert configured in caught.value.message


async def test_rocksmq_is_opened_as_configured(tmp_path):
    given = {"rocksmq.path": str(tmp_path / "a log"), "rocksmq.segmentSizeInMB": 1, "rocksmq.freeSpaceInMB": 1}
    settings = load_settings(environment={}, arguments=given)
    options = wal_options(settings)
    assert options == {"metrics": None, "segment_bytes": 1024 * 1024, "free_space_bytes": 1024 * 1024}
    wal = await open_wal(wal_url(settings), **options)
    assert (tmp_path / "a log").is_dir()
    await wal.close()
    assert wal_options(load_settings(environment={}, arguments={"wal": "memory://"})) == {}


def test_kafka_is_opened_with_its_credentials():
    settings = load_settings(environment={}, arguments={"wal": "kafka://a:1", "kafka.saslUsername": "me"})
    assert wal_options(settings) == {"settings": settings.kafka, "metrics": None}


@pytest.mark.parametrize("scheme", ["pulsar", "pulsar+ssl"])
def test_pulsar_is_opened_with_its_settings(scheme):
    settings = load_settings(environment={}, arguments={"wal": f"{scheme}://a:1", "pulsar.tenant": "mine"})
    assert wal_options(settings) == {"settings": settings.pulsar, "metrics": None}
    assert resolve_mq_type(settings, standalone=False) == "pulsar"
