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

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ...runtime.lazy import lazy_names
from .backend import BACKEND

if TYPE_CHECKING:
    from ...runtime.log.wal import Wal
    from .wal import KafkaWal as KafkaWal
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {".wal": "KafkaWal"})
    __all__ += ["open_wal"]

open_wal: Callable[..., Awaitable[Wal]] = BACKEND.open
