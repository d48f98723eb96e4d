"""Brokers that the environment names are used as they are."""

from __future__ import annotations

import pytest

from .given import KAFKA, PULSAR, PULSAR_WEB, given_kafka, given_pulsar


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (KAFKA, PULSAR, PULSAR_WEB):
        monkeypatch.delenv(name, raising=False)


def test_none_is_given_by_default():
    assert given_kafka() is None
    assert given_pulsar() is None


@pytest.mark.parametrize("value", ["one:9092,two:9092", "kafka://one:9092,two:9092"])
def test_kafka_is_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv(KAFKA, value)
    given = given_kafka()
    assert (given.bootstrap, given.url) == ("one:9092,two:9092", "kafka://one:9092,two:9092")


def test_pulsar_is_where_the_variables_say(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(PULSAR, "pulsar://one:6650")
    assert (given_pulsar().url, given_pulsar().web_url) == ("pulsar://one:6650", "http://one:8080")
    monkeypatch.setenv(PULSAR_WEB, "http://two:8081/")
    assert given_pulsar().web_url == "http://two:8081"
