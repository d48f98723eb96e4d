"""A broker with authentication: certificates of both sides, and passwords, over TLS."""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.brokers import facts, jars
from tests.brokers.certificates import Authority
from tests.brokers.fixtures import require
from tests.brokers.kafka import KafkaCluster
from tests.brokers.processes import free_ports
from tidewal.adapters.kafka import open_wal
from tidewal.adapters.kafka.settings import KafkaSettings
from tidewal.runtime.errors import ConfigError, Unavailable
from tidewal.runtime.log.wal import ChannelPolicy, From

pytestmark = [pytest.mark.broker, pytest.mark.slow]

USER, PASSWORD = "me", "a-secret"
CLUSTER = base64.urlsafe_b64encode(b"guarded cluster.").decode().rstrip("=")
KEY_PASSWORD = "another"
MODULES = "org.apache.kafka.common.security"


class Guarded(KafkaCluster):
    """One node, with a listener that asks for a certificate and one that asks for a password."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "kafka")
        self.authority = Authority(directory / "certificates")
        certificate, key = self.authority.issue("broker")
        self._store = directory / "broker.pem"
        self._store.write_text(key.read_text() + certificate.read_text())
        self.tls, self.sasl = free_ports(2)

    def _properties(self, node: int) -> str:
        base = facts.parse_properties(super()._properties(node).splitlines())
        added = f"SSL://127.0.0.1:{self.tls},SASL_SSL://127.0.0.1:{self.sasl}"
        own = {
            "listeners": f"{base['listeners']},{added}",
            "advertised.listeners": f"{base['advertised.listeners']},{added}",
            "listener.security.protocol.map": ",".join(
                f"{name}:{name.replace('CONTROLLER', 'PLAINTEXT')}"
                for name in ("CONTROLLER", "PLAINTEXT", "SSL", "SASL_SSL")
            ),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self._store),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.authority.certificate),
            "listener.name.ssl.ssl.client.auth": "required",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
            "listener.name.sasl_ssl.plain.sasl.jaas.config": (
                f'{MODULES}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
            ),
            "listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config": f"{MODULES}.scram.ScramLoginModule required;",
        }
        return facts.properties(base, own)

    def _write_folder(self, node: int, template: Path) -> None:
        """Formatted anew, with the user for SCRAM; the one for PLAIN is in the listener's settings."""
        super()._write_folder(node, template)
        folder = self._folder(node)
        shutil.rmtree(folder / "data")
        subprocess.run(
            jars.find("kafka").command(
                *("kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", str(folder / "server.properties")),
                *("--add-scram", f"SCRAM-SHA-256=[name={USER},password={PASSWORD}]"),
            ),
            check=True,
            capture_output=True,
            timeout=60,
        )


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    require("kafka")
    with Guarded(tmp_path_factory.mktemp("guarded")) as cluster:
        yield cluster


def password_settings(cluster: Guarded, mechanism: str, password: str = PASSWORD) -> dict[str, Any]:
    return {
        "securityProtocol": "SASL_SSL",
        "saslMechanisms": mechanism,
        "saslUsername": USER,
        "saslPassword": password,
        "ssl": {"tlsCaCert": str(cluster.authority.certificate)},
    }


async def check(port: int, settings: dict[str, Any], prefix: str, **options: Any) -> None:
    """Append something and read it."""
    wal = await open_wal(
        f"kafka://127.0.0.1:{port}/{prefix}", settings=KafkaSettings.model_validate(settings), **options
    )
    await wal.create_channel("a", ChannelPolicy())
    await wal.append("a", b"hello")
    reader: Any = wal.read("a", From.EARLIEST)
    assert [bytes(entry.payload) for entry in await anext(reader)] == [b"hello"]
    await wal.close()


@pytest.mark.long
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
async def test_a_password_opens_and_a_wrong_one_is_refused(guarded: Guarded, mechanism: str):
    await check(guarded.sasl, password_settings(guarded, mechanism), mechanism)
    with pytest.raises(ConfigError, match="Authentication failed"):
        await check(guarded.sasl, password_settings(guarded, mechanism, "wrong"), "wrong")


async def test_keys_of_the_client_say_the_same(guarded: Guarded):
    given = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": PASSWORD,
        "ssl.ca.location": str(guarded.authority.certificate),
    }
    await check(guarded.sasl, {"producer": given, "consumer": given}, "keys")


async def test_a_certificate_opens_and_none_is_refused(guarded: Guarded, tmp_path: Path):
    certificate, key = guarded.authority.issue("client", KEY_PASSWORD)
    trust = {"enabled": True, "tlsCaCert": str(guarded.authority.certificate)}
    ours = {"tlsCert": str(certificate), "tlsKey": str(key), "tlsKeyPassword": KEY_PASSWORD}
    await check(guarded.tls, {"ssl": {**trust, **ours}}, "certificate")
    with pytest.raises(Unavailable):  # the broker hangs up without a word
        await check(guarded.tls, {"ssl": trust}, "refused", delivery_timeout_s=1)
    stranger = Authority(tmp_path / "stranger")
    with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
        await check(guarded.tls, {"ssl": {**trust, **ours, "tlsCaCert": str(stranger.certificate)}}, "refused")
