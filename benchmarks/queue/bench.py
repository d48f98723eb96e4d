"""What the subjects share: a directory, sizes, and a Kafka broker that is started when one is asked for."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.brokers.kafka import KafkaCluster


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured: `pending` messages that wait, `seconds` of a load, `mib` that are migrated, and each number
    of `channels` that are replicated."""

    rounds: int
    messages: int
    pending: int
    seconds: float
    mib: int
    channels: Sequence[int]


FULL = Sizes(rounds=5, messages=50_000, pending=10_000_000, seconds=20, mib=1024, channels=(16, 256, 2_000))
QUICK = Sizes(rounds=1, messages=2_000, pending=20_000, seconds=2, mib=16, channels=(16,))


class Bench:
    """Scratch space in `directory`, and one broker for all subjects. A context manager."""

    def __init__(self, directory: str, sizes: Sizes) -> None:
        self.sizes: Sizes = sizes
        self._directory = Path(directory)
        self._numbers = itertools.count(1)
        self._stack = contextlib.ExitStack()
        self._kafka: KafkaCluster | None = None

    def folder(self) -> Path:
        """A new folder."""
        folder = self._directory / f"{next(self._numbers)}"
        folder.mkdir()
        return folder

    def kafka(self) -> str:
        """The URL of a new log on the broker."""
        if self._kafka is None:
            self._kafka = self._stack.enter_context(KafkaCluster(self.folder()))
        return f"{self._kafka.url}/bench-{next(self._numbers)}"

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
