"""`kafka.producer.*` and `kafka.consumer.*`: what is an option of ours, what is refused, what a warning names."""

from __future__ import annotations

import logging
import re

import pytest

from tidewal.adapters.kafka.options import KafkaOptions, parse
from tidewal.runtime.config.loading import load_settings
from tidewal.runtime.errors import ConfigError

URL = "kafka://one:1"


def parsed(**given: str) -> KafkaOptions:
    arguments = {f"kafka.{client}.{key}": value for name, value in given.items() for client, _, key in [split(name)]}
    return parse(URL, load_settings(environment={}, arguments=arguments).kafka)


def split(name: str) -> tuple[str, str, str]:
    client, _, key = name.partition("_")
    return client, "", key.replace("_", ".")


@pytest.mark.parametrize(
    ("key", "value", "option", "expected"),
    [
        ("producer_batch_size", "65536", "batch_bytes", 65536),
        ("producer_buffer_memory", "1000", "pending_bytes", 1000),
        ("producer_queue_buffering_max_kbytes", "2", "pending_bytes", 2048),
        ("producer_compression_type", "gzip", "compression", "gzip"),
        ("producer_delivery_timeout_ms", "1500", "delivery_timeout_s", 1.5),
        ("producer_message_timeout_ms", "1500", "delivery_timeout_s", 1.5),
        ("producer_request_timeout_ms", "700", "request_timeout_s", 0.7),
        ("producer_message_max_bytes", "1000000", "max_message_bytes", 1000000),
        ("producer_max_request_size", "1000000", "max_message_bytes", 1000000),
        ("producer_client_id", "here", "client_id", "here"),
        ("consumer_client_id", "here", "client_id", "here"),
        ("consumer_fetch_max_bytes", "5", "fetch_bytes", 5),
        ("consumer_max_partition_fetch_bytes", "5", "fetch_bytes", 5),
        ("consumer_queued_max_messages_kbytes", "5", "prefetch_bytes", 5120),
    ],
)
def test_a_key_with_a_meaning_is_an_option(key: str, value: str, option: str, expected: object):
    assert getattr(parsed(**{key: value}), option) == expected


@pytest.mark.parametrize("client", ["producer", "consumer"])
def test_the_login_may_stand_there_too(client: str):
    given = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "me",
        "sasl.password": "x",
    }
    options = parse(URL, load_settings(environment={}, arguments={"kafka": {client: given}}).kafka)
    assert options.client == {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "me",
        "sasl_plain_password": "x",
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("producer_acks", "1"),
        ("producer_enable_idempotence", "false"),
        ("producer_transactional_id", "mine"),
        ("producer_batch_size", "large"),
        ("producer_batch_size", "0"),
        ("producer_compression_type", "brotli"),
        ("consumer_enable_auto_commit", "true"),
        ("consumer_isolation_level", "serializable"),
    ],
)
def test_what_cannot_be_is_refused_by_name(key: str, value: str):
    client, _, name = split(key)
    with pytest.raises(ConfigError, match=f"{re.escape(f'kafka.{client}.{name}')}|compression|batch_bytes"):
        parsed(**{key: value})


def test_two_clients_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"kafka\.consumer\.client\.id.*kafka\.producer\.client\.id"):
        parsed(producer_client_id="a", consumer_client_id="b")


def test_what_is_so_anyway_says_nothing_and_the_rest_is_named_once(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert parsed(producer_acks="all", producer_enable_idempotence="true") == parsed()
        assert not caplog.records
        assert (
            parsed(producer_linger_ms="5", consumer_group_id="g", consumer_isolation_level="read_committed") == parsed()
        )
    (record,) = caplog.records
    assert "kafka.consumer.group.id, kafka.producer.linger.ms" in record.getMessage()


def test_a_url_beats_the_keys():
    settings = load_settings(environment={}, arguments={"kafka.producer.batch.size": "1"}).kafka
    assert parse(f"{URL}?batch_bytes=2", settings).batch_bytes == 2
    assert parse(URL, settings, batch_bytes=3).batch_bytes == 3
