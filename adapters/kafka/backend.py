"""Kafka as a backend: what is known of it before `aiokafka` is loaded."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from ...runtime.log.backend import WalBackend
from ...runtime.log.wal import Capabilities, Wal

if TYPE_CHECKING:
    from ...runtime.metrics.metrics import Metrics
    from .settings import KafkaSettings


class KafkaBackend(WalBackend):
    """A log in a cluster of Kafka."""

    name = "kafka"
    schemes: tuple[str, ...] = ("kafka",)
    url_form = "kafka://HOST:PORT,HOST:PORT/PREFIX"
    needs_host = True
    repeated_log_lines: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "aiokafka": ("Unable connect to", "Unable to request metadata from", "Unable to update metadata from")
    }

    async def open(
        self,
        url: str,
        *,
        own: bool | None = None,
        read_only: bool = False,
        settings: KafkaSettings | None = None,
        metrics: Metrics | None = None,
        **options: Any,
    ) -> Wal:
        """Open `kafka://host:port[,host:port…][/PREFIX][?option=value]`, with the options of `options.KafkaOptions`.

        `PREFIX` (default "tidewal") begins the names of the log's topics: one cluster holds many logs. `settings` are
        the keys `kafka.*`, also for the login; stalls are counted in `metrics`. `own` means nothing here: any number of
        processes may open one log. With `read_only` no topic is created, neither on opening nor by reading.
        Raises `Unavailable` when no broker answers in time or `read_only` finds no log, and `ConfigError` for options.
        """
        from .options import parse
        from .wal import KafkaWal

        with _without_repeated_lines():
            return await KafkaWal.connect(parse(url, settings, **options), metrics, read_only=read_only)

    def settings(self) -> type[KafkaSettings]:
        from .settings import KafkaSettings

        return KafkaSettings

    def capabilities(self) -> Capabilities:
        from .wal import CAPABILITIES

        return CAPABILITIES


@contextmanager
def _without_repeated_lines() -> Generator[None]:
    """The library's client says ten times a second that no broker answers: while a log is opened the error says it."""
    library, prefixes = logging.getLogger("aiokafka"), KafkaBackend.repeated_log_lines["aiokafka"]

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(prefixes)

    library.addFilter(is_news)
    try:
        yield
    finally:
        library.removeFilter(is_news)


BACKEND = KafkaBackend()
