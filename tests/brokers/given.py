"""Where a broker is that another process runs: one of the same test run, or one that the environment names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from . import facts

KAFKA = "TIDEWAL_TEST_KAFKA"
PULSAR = "TIDEWAL_TEST_PULSAR"
PULSAR_WEB = "TIDEWAL_TEST_PULSAR_WEB"


@dataclass(frozen=True)
class GivenKafka:
    """Where clients find a Kafka that this process may not kill."""

    bootstrap: str

    @property
    def url(self) -> str:
        return f"kafka://{self.bootstrap}"


@dataclass(frozen=True)
class GivenPulsar:
    """Where clients find a Pulsar that this process may not kill."""

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
