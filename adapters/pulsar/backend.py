"""Pulsar as a backend: what is known of it before its client library is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...runtime.log.backend import WalBackend
from ...runtime.log.wal import Capabilities, Wal

if TYPE_CHECKING:
    from ...runtime.metrics.metrics import Metrics
    from .settings import PulsarSettings


class PulsarBackend(WalBackend):
    """A log in a namespace of Pulsar."""

    name = "pulsar"
    schemes: tuple[str, ...] = ("pulsar", "pulsar+ssl")
    url_form = "pulsar://HOST:PORT/TENANT/NAMESPACE"
    needs_host = True

    async def open(
        self,
        url: str,
        *,
        own: bool | None = None,
        read_only: bool = False,
        settings: PulsarSettings | None = None,
        metrics: Metrics | None = None,
        **options: Any,
    ) -> Wal:
        """Open `pulsar://HOST[:PORT][,HOST…][/TENANT/NAMESPACE][?option=value]`, with the options of
        `options.PulsarOptions`.

        `settings` are the keys `pulsar.*`; stalls are counted in `metrics`. `own` means nothing here: any number of
        processes may open one log. With `read_only` neither the namespace nor a topic is created, and no setting is
        changed. Raises `Unavailable` when Pulsar's web service does not answer in time or `read_only` finds no
        namespace, and `ConfigError` for options, and where `read_only` finds a namespace in which readers create
        topics.
        """
        from .options import parse
        from .wal import Pulsar

        return await Pulsar.open(parse(url, settings, **options), metrics, read_only=read_only)

    def settings(self) -> type[PulsarSettings]:
        from .settings import PulsarSettings

        return PulsarSettings

    def capabilities(self) -> Capabilities:
        from .wal import Pulsar

        return Pulsar.capabilities


BACKEND = PulsarBackend()
