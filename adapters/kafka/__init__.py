"""Kafka: a topic with one partition per channel, reached with `aiokafka` (the extra `kafka`).

Beside what every log does (`runtime/wal.py`):

- `acks` of a channel is `acks` of its appends; none is answered like one, since only the broker's answer has the id.
- Retention is Kafka's, of whole segments, now and then; by size it does not act on a channel that is held.
- An ephemeral channel is a topic that keeps five minutes and acknowledges as soon as its leader has the entry. It is on
  disk, and `ephemeral_bytes` is a hint for retention.
- A batch over several channels is not atomic; when a part of it fails the error says `outcome_unknown`.
- Consumer groups are Kafka's own (`groups/`); readers read what transactions have committed.
"""

from __future__ import annotations

from ...runtime.metrics import Metrics
from ...runtime.settings import Kafka
from ...runtime.wal import Wal
from .options import parse
from .wal import KafkaWal


async def open_wal(
    url: str,
    *,
    own: bool | None = None,
    settings: Kafka | None = None,
    metrics: Metrics | None = None,
    read_only: bool = False,
    **options: object,
) -> Wal:
    """Open `kafka://host:port[,host:port…][/PREFIX][?option=value]`, with the options of `options.Options`.

    `PREFIX` ("tidewal") is what the names of the log's topics begin with: one cluster holds many logs. `settings` are
    the keys `kafka.*`, for who may log in; stalls are counted in `metrics`. `own` means nothing here: any number of
    processes open one log. `read_only`: no topic is made, neither now nor by reading.
    Raises `Unavailable` when no broker answers in time and where `read_only` finds no log, `ConfigError`.
    """
    return await KafkaWal.connect(parse(url, settings, **options), metrics, read_only=read_only)


__all__ = ["KafkaWal", "open_wal"]
