"""No password or token of a URL or of the settings is in an error, a log line, a metric, a repr or a tool's output."""

from __future__ import annotations

import logging
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from tidewal.actors.standalone import standalone
from tidewal.adapters.kafka.options import parse as kafka_options
from tidewal.adapters.kafka.settings import KafkaSettings
from tidewal.adapters.pulsar.options import parse as pulsar_options
from tidewal.adapters.pulsar.settings import PulsarSettings
from tidewal.cli.main import app
from tidewal.runtime.config.loading import load_settings
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import ConfigError, InvalidRequest, TidewalError
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.redaction import shown_url
from tidewal.spark_bridge.log import open_log
from tidewal.spark_bridge.options import ReadOptions as SourceOptions
from tidewal.spark_bridge.sink.options import SinkOptions

SECRET = "hunter2"
FAST = "request_timeout_s=0.2"

WRONG = [
    f"pulsr://broker:6650/public/default?token={SECRET}",
    f"pulsar:broker?token={SECRET}",
    f"pulsar://broker:6650/public?token={SECRET}",
    f"pulsar://user:{SECRET}@127.0.0.1:1/public/default?{FAST}",
    f"pulsar://127.0.0.1:1/public/default?token={SECRET}&reqest_timeout_s=1",
    f"pulsar://127.0.0.1:1/public/default?token={SECRET}&{FAST}",
    f"pulsar+ssl://127.0.0.1:1/public/default?token={SECRET}&{FAST}",
    f"pulsar://127.0.0.1:1/public/default?web_url=http://user:{SECRET}@127.0.0.1:1&{FAST}",
    f"kafka://user:{SECRET}@broker:9092",
    f"kafka://{SECRET}@broker:9092",
    f"kafka://user:{SECRET}/@broker:9092",
    f"kafka://user:?{SECRET}@broker:9092",
    f"kafka://127.0.0.1:1/a/b?password={SECRET}",
    f"kafka://127.0.0.1:1/prefix?sasl_password={SECRET}",
    f"rocksmq://user:{SECRET}@host:1?token_file=x",
    f"rocksmq://?token={SECRET}",
    f"woodpecker://user:{SECRET}@host",
    f"user:{SECRET}@host",
    f"kafka:/user:{SECRET}@broker:9092",
    f"kafka:///user:{SECRET}@broker:9092",
    f"kafka://us\u2100er:{SECRET}@broker:9092",
]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("pulsar://h:6650/public/default?token=hunter2&a=b", "pulsar://h:6650/public/default?token=***&a=***"),
        ("kafka://user:hunter2@h:1,h:2/p", "kafka://***@h:1,h:2/p"),
        ("kafka://user:hun/ter2@h:1/p", "kafka://***@h:1/p"),
        ("kafka://user:hunt?er2@h:1/p", "kafka://***?***"),
        ("pulsar://h?hunter2", "pulsar://h?***"),
        ("pulsar://h#hunter2", "pulsar://h#***"),
        ("hunter2@h", "***@h"),
        ("kafka:/user:hunter2@h:1", "kafka:***@h:1"),
        ("kafka:///user:hunter2@h:1/p", "kafka://***@h:1/p"),
        ("rocksmq:///home/me@work/log", "rocksmq:///home/me@work/log"),
        ("rocksmq://./me@work/log", "rocksmq://./me@work/log"),
        ("/home/me@work/log", "/home/me@work/log"),
        ("kafka://h:1,h:2/prefix", "kafka://h:1,h:2/prefix"),
        ("nonsense", "nonsense"),
        ("", ""),
        ("s3://b/p?endpoint=http://a:9000&secret=x", "s3://b/p?endpoint=http://a:9000&secret=***"),
        ("s3://b/p?endpoint=http%3A%2F%2Fa.b%3A9000", "s3://b/p?endpoint=http%3A%2F%2Fa.b%3A9000"),
        ("s3://b/p?endpoint=http://user:secret@a:9000", "s3://***?endpoint=***"),
        ("s3://b/p?endpoint=http://user:secret%40a:9000", "s3://b/p?endpoint=***"),
        ("s3://b/p?endpoint=secret", "s3://b/p?endpoint=***"),
    ],
)
def test_a_url_is_shown_without_credentials(url: str, shown: str):
    assert shown_url(url) == shown


@pytest.mark.parametrize("url", WRONG)
async def test_no_error_and_no_log_line_has_a_secret(url: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(TidewalError) as raised:
        await open_wal(url)
    assert SECRET not in "".join(traceback.format_exception(raised.value)) + caplog.text


@pytest.mark.parametrize("wrong", [b"kafka://user:hunter2@h:1", ["kafka://user:hunter2@h:1"]])
async def test_no_error_about_a_url_of_another_type_has_a_secret(wrong: Any):
    with pytest.raises(InvalidRequest, match="must be text or a Path, not") as raised:
        await open_wal(wrong)
    assert SECRET not in raised.value.message


@pytest.mark.parametrize("line", ['"hunter2', "@hunter2", "%hunter2", "hunter2: x: y"])
def test_no_error_about_a_file_of_settings_has_a_secret(line: str, tmp_path: Path):
    (tmp_path / "a.yaml").write_text(f"kafka:\n  sasl:\n    password: {line}\n")
    with pytest.raises(ConfigError, match=r"not valid YAML: line \d") as raised:
        load_settings(tmp_path / "a.yaml", environment={})
    assert SECRET not in "".join(traceback.format_exception(raised.value))


@pytest.mark.slow
@pytest.mark.parametrize("url", WRONG)
def test_no_error_of_spark_and_the_tools_has_a_secret(url: str, monkeypatch: pytest.MonkeyPatch):
    if not url.startswith(("kafka://", "pulsar")):  # those are opened by their first request
        with pytest.raises((TidewalError, ValueError)) as raised:
            open_log(url).channels()
        assert SECRET not in str(raised.value)
    monkeypatch.setenv("TIDEWAL__KAFKA__PRODUCER__REQUEST.TIMEOUT.MS", "200")
    for command in (["inspect", url], ["verify", "journal", url], ["groups", "list", url]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code != 0
        assert SECRET not in result.output + str(result.exception)


@pytest.mark.slow
async def test_brokers_that_are_not_there_are_named_without_the_login(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    login = {"sasl_username": "user", "sasl_password": SecretStr(SECRET)}
    settings = KafkaSettings(security_protocol="SASL_PLAINTEXT", **login)  # pyright: ignore[reportArgumentType] -- by name
    with pytest.raises(TidewalError) as raised:
        await open_wal("kafka://127.0.0.1:1?request_timeout_s=0.2&delivery_timeout_s=0.5", settings=settings)
    assert SECRET not in "".join(traceback.format_exception(raised.value)) + caplog.text


def test_no_repr_of_options_or_settings_has_a_secret():
    url = f"pulsar://h/public/default?token={SECRET}"
    login = {"sasl.username": "user", "sasl.password": SECRET}
    kafka = KafkaSettings(
        security_protocol="SASL_PLAINTEXT", sasl_username="user", sasl_password=SecretStr(SECRET), producer=login
    )
    pulsar = PulsarSettings(address=url, webaddress=f"http://u:{SECRET}@h", auth_params=SecretStr(f"token:{SECRET}"))
    printed: list[object] = [
        Settings(wal=url, kafka=kafka, pulsar=pulsar),
        kafka_options("kafka://h:1", kafka),
        pulsar_options(url),
        SourceOptions.parse({"wal": url, "topic": "t"}),
        SinkOptions.parse({"wal": url, "topic": "t"}, streaming=False),
    ]
    for each in printed:
        assert SECRET not in f"{each!r} {each}"


def test_settings_that_are_wrong_are_named_without_their_secrets(monkeypatch: pytest.MonkeyPatch):
    for key in list(os.environ):
        if key.startswith("TIDEWAL__"):
            monkeypatch.delenv(key)
    for arguments in (
        {"kafka.saslPasword": SECRET},
        {"pulsar.port": "none", "pulsar.authParams": SECRET},
        {"kafka.producer.sasl.password": SECRET, "kafka.producer.acks": "0"},
    ):
        with pytest.raises(ConfigError) as raised:
            kafka_options("kafka://h:1", load_settings(arguments=arguments).kafka)
        assert SECRET not in str(raised.value)


async def test_a_node_and_the_tools_show_no_secret_of_their_log(tmp_path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    url = f"memory://user:{SECRET}@host?token={SECRET}"
    async with standalone(tmp_path, wal=url, settings=Settings()) as node:
        metrics = node.node.metrics
        assert SECRET not in f"{node!r} {vars(node)!r}"
        async with node.client() as client:
            assert await client.list_collections() == []
    assert SECRET not in metrics.render().decode() + caplog.text


def test_inspect_shows_the_log_without_credentials():
    result = CliRunner().invoke(app, ["inspect", f"memory://user:{SECRET}@host?token={SECRET}", "--json"])
    assert result.exit_code == 0, result.output
    assert SECRET not in result.output
    assert "memory://***@host?token=***" in result.output
