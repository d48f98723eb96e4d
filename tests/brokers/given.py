"""Brokers that somebody else runs, named in the environment: tests use them, but cannot kill or pause them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import urlsplit

import pytest

from . import facts

KAFKA = "TIDEWAL_TEST_KAFKA"
PULSAR = "TIDEWAL_TEST_PULSAR"
PULSAR_WEB = "TIDEWAL_TEST_PULSAR_WEB"


class _NotOurs:
    """Skips the test that asks for what only a broker of our own can do."""

    managed = False

    def _skip(self, *_: object) -> NoReturn:
        pytest.skip(f"kills or pauses a broker, which those of {KAFKA} and {PULSAR} are not for")

    kill = pause = resume = terminate = restart = running = pid = _skip
    metadata = partition = controller = _skip


@dataclass(frozen=True)
class GivenKafka(_NotOurs):
    """Like `KafkaCluster` for clients."""

    bootstrap: str

    @property
    def url(self) -> str:
        return f"kafka://{self.bootstrap}"


@dataclass(frozen=True)
class GivenPulsar(_NotOurs):
    """Like `PulsarStandalone` for clients."""

    url: str
    web_url: str


def given_kafka() -> GivenKafka | None:
    """The Kafka that TIDEWAL_TEST_KAFKA names by its bootstrap servers."""
    bootstrap = os.environ.get(KAFKA)
    return GivenKafka(bootstrap.removeprefix("kafka://")) if bootstrap else None


def given_pulsar() -> GivenPulsar | None:
    """The Pulsar of TIDEWAL_TEST_PULSAR; its administration is at TIDEWAL_TEST_PULSAR_WEB, or at the usual port."""
    url = os.environ.get(PULSAR)
    if not url:
        return None
    web_url = os.environ.get(PULSAR_WEB) or f"http://{urlsplit(url).hostname}:{facts.PULSAR_WEB_PORT}"
    return GivenPulsar(url, web_url.rstrip("/"))
