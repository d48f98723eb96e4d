"""Links over real sockets, as the settings ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.brokers.certificates import Authority
from tidewal.runtime.config.loading import load_settings, wal_options
from tidewal.runtime.errors import ConfigError, Unavailable
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import ChannelPolicy, From, Wal


async def opened(url: str, own: bool | None = None, **keys: Any) -> Wal:
    """The log, opened with these settings."""
    arguments = {"objects.leaseS": 2, "objects.lingerMs": 1, **{name.replace("_", "."): keys[name] for name in keys}}
    return await open_wal(url, own=own, **wal_options(load_settings(environment={}, arguments=arguments), url))


def tls(authority: Authority, name: str) -> dict[str, str]:
    certificate, key = authority.issue(name)
    return {
        "cluster_ssl_tlsCert": str(certificate),
        "cluster_ssl_tlsKey": str(key),
        "cluster_ssl_tlsCaCert": str(authority.certificate),
    }


@pytest.mark.slow
@pytest.mark.parametrize("secured", [False, True])
async def test_processes_with_the_secret_write_through_the_owner(tmp_path: Path, secured: bool) -> None:
    url = f"file://{tmp_path}/log"
    authority = Authority(tmp_path / "authority") if secured else None
    known: dict[str, Any] = {"cluster_secret": "s"} | (tls(authority, "a") if authority else {})
    async with (
        await opened(url, own=True, objects_listen="127.0.0.1:0", **known) as owner,
        await opened(url, own=False, **known) as other,
        await opened(url, own=False, cluster_secret="another") as stranger,
        await opened(url) as unlinked,
    ):
        assert owner.capabilities.multi_process_write
        assert not unlinked.capabilities.multi_process_write
        await other.create_channel("a", ChannelPolicy())
        id = await other.append("a", b"x")
        assert await owner.latest_id("a") == await stranger.latest_id("a") == id
        reader = owner.read("a", From.EARLIEST)
        assert [bytes(entry.payload) for entry in await anext(reader)] == [b"x"]
        with pytest.raises(Unavailable, match=r"cluster\.secret"):
            await unlinked.append("a", b"y")
        await stranger._links.route.look()
        assert stranger._links.route.link is None


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"objects_listen": "0.0.0.0:7500", "cluster_secret": "s"}, "address by which others reach"),
        ({"objects_listen": "127.0.0.1:7500"}, "needs a secret"),
        ({"objects_listen": "10.0.0.1:7500", "cluster_secret": "s"}, "needs certificates"),
        ({"objects_advertise": "nowhere", "cluster_secret": "s"}, "is no address"),
    ],
)
async def test_places_that_no_other_process_could_use_are_refused(
    tmp_path: Path, keys: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        await opened(f"file://{tmp_path}/log", **keys)
