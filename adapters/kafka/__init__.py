"""Kafka: a topic with one partition per channel, reached with `aiokafka` (the extra `kafka`).

In addition to what every WAL guarantees (`runtime/log/wal.py`):

- `acks` of a channel is `acks` of its appends; "none" is treated like "one", since only the broker's answer has the id.
- Retention is Kafka's: it removes whole segments, periodically; retention by size does not act on a channel with holds.
- An ephemeral channel is a topic with five minutes of retention whose leader alone acknowledges an entry. It is on
  disk, and `ephemeral_bytes` is a hint for retention.
- A batch over several channels is not atomic; when a part of it fails the error says `outcome_unknown`.
- Consumer groups are Kafka's own (`groups/`); readers read only committed transactions.
"""

from __future__ import annotations

from ...runtime.config.settings import KafkaSettings
from ...runtime.log.wal import Wal
from ...runtime.metrics.metrics import Metrics
from .options import parse
from .wal import KafkaWal


async def open_wal(
    url: str,
    *,
    own: bool | None = None,
    settings: KafkaSettings | None = None,
    metrics: Metrics | None = None,
    read_only: bool = False,
    **options: object,
) -> Wal:
    """Open `kafka://host:port[,host:port…][/PREFIX][?option=value]`, with the options of `options.KafkaOptions`.

    `PREFIX` (default "tidewal") begins the names of the log's topics: one cluster holds many logs. `settings` are the
    keys `kafka.*`, also for the login; stalls are counted in `metrics`. `own` means nothing here: any number of
    processes may open one log. With `read_only` no topic is created, neither on opening nor by reading.
    Raises `Unavailable` when no broker answers in time or `read_only` finds no log, and `ConfigError` for options.
    """
    return await KafkaWal.connect(parse(url, settings, **options), metrics, read_only=read_only)


__all__ = ["KafkaWal", "open_wal"]
