"""What a process may do with links, as its settings say: make them, and take them where it owns the log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ....runtime.cluster.identity import connection_key
from ....runtime.config.settings import ClusterSettings
from ....runtime.direct.address import HostPort
from ....runtime.direct.network import Network, TcpNetwork
from ....runtime.errors import ConfigError

if TYPE_CHECKING:
    from ..settings import ObjectsSettings


@dataclass(frozen=True, slots=True)
class LinkAccess:
    """How processes with the secret of `key` are connected. While this one owns the log it listens at `listen`, which
    others reach at `address`; None: it takes no links."""

    network: Network
    key: bytes = field(repr=False)
    listen: HostPort | None = None
    address: HostPort | None = None


def link_access(settings: ObjectsSettings, cluster: ClusterSettings | None) -> LinkAccess | None:
    """The access to links that the settings give, None without a secret of the cluster. Raises `ConfigError`."""
    cluster = cluster or ClusterSettings()
    try:
        place = ClusterSettings.model_validate(
            cluster.model_dump() | {"listen": settings.listen, "address": settings.advertise}
        )
        listen, address = place.listens_on, place.reached_at
    except (ValidationError, ValueError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"objects.listen, objects.advertise: {reason}", key="objects.listen") from None
    secret = cluster.secret.get_secret_value()
    return LinkAccess(TcpNetwork(cluster), connection_key(secret), listen, address) if secret else None
