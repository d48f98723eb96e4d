"""Pulsar: `pulsar://host:port/tenant/namespace`, for a log that Apache Pulsar keeps."""

from __future__ import annotations

from ...runtime.metrics import Metrics
from ...runtime.settings import Pulsar as PulsarSettings
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
    """Open `pulsar://HOST[:PORT][,HOST…][/TENANT/NAMESPACE][?option=value]`, with the options of `options.Options`.

    `settings` are the keys `pulsar.*`; stalls are counted in `metrics`. `own` means nothing here: any number of
    processes open one log. `read_only`: neither the namespace nor a topic is made, and no setting is changed.
    Raises `Unavailable` when Pulsar's web service does not answer in time and where `read_only` finds no namespace,
    `ConfigError`, also where `read_only` finds one in which readers make topics.
    """
    return await Pulsar.open(parse(url, settings, **options), metrics, read_only=read_only)
