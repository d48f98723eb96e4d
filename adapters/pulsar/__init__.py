"""Pulsar: `pulsar://host:port/tenant/namespace`, a log on Apache Pulsar."""

from __future__ import annotations

from ...runtime.config.settings import PulsarSettings as PulsarSettings
from ...runtime.metrics.metrics import Metrics
from .options import parse
from .wal import Pulsar

__all__ = ["Pulsar", "open_wal"]


async def open_wal(
    url: str,
    *,
    own: bool | None = None,
    settings: PulsarSettings | None = None,
    metrics: Metrics | None = None,
    read_only: bool = False,
    **options: object,
) -> Pulsar:
    """Open `pulsar://HOST[:PORT][,HOST…][/TENANT/NAMESPACE][?option=value]`, with the options of
    `options.PulsarOptions`.

    `settings` are the keys `pulsar.*`; stalls are counted in `metrics`. `own` means nothing here: any number of
    processes may open one log. With `read_only` neither the namespace nor a topic is created, and no setting is
    changed. Raises `Unavailable` when Pulsar's web service does not answer in time or `read_only` finds no namespace,
    and `ConfigError` for options, and where `read_only` finds a namespace in which readers create topics.
    """
    return await Pulsar.open(parse(url, settings, **options), metrics, read_only=read_only)
