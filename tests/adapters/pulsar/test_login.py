"""A broker with authentication by a token, over TLS."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.brokers.certificates import Authority
from tests.brokers.fixtures import require
from tests.brokers.processes import free_ports
from tests.brokers.pulsar import PulsarStandalone
from tidewal.adapters.pulsar import open_wal
from tidewal.adapters.pulsar.settings import PulsarSettings
from tidewal.runtime.errors import ConfigError, TidewalError
from tidewal.runtime.log.wal import ChannelPolicy, From

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.long]

SECRET = b"thirty-two bytes of what is known"
ROLE = "me"
TOKEN_CLASSES = "org.apache.pulsar.broker.authentication.AuthenticationProviderToken"
CLIENT_CLASS = "org.apache.pulsar.client.impl.auth.AuthenticationToken"


def token_of(role: str, secret: bytes = SECRET) -> str:
    """A JSON web token for the client."""

    def part(data: bytes) -> bytes:
        return base64.urlsafe_b64encode(data).rstrip(b"=")

    said = part(json.dumps({"alg": "HS256"}).encode()) + b"." + part(json.dumps({"sub": role}).encode())
    return (said + b"." + part(hmac.new(secret, said, hashlib.sha256).digest())).decode()


class Guarded(PulsarStandalone):
    """One node that refuses clients without a token, reached over TLS too."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory / "certificates")
        certificate, key = self.authority.issue("broker")
        self.tls, self.web_tls = free_ports(2)
        super().__init__(
            directory,
            settings={
                "authenticationEnabled": "true",
                "authorizationEnabled": "true",
                "authenticationProviders": TOKEN_CLASSES,
                "superUserRoles": ROLE,
                "tokenSecretKey": "data:;base64," + base64.b64encode(SECRET).decode(),
                "brokerClientAuthenticationPlugin": CLIENT_CLASS,
                "brokerClientAuthenticationParameters": "token:" + token_of(ROLE),
                "brokerServicePortTls": str(self.tls),
                "webServicePortTls": str(self.web_tls),
                "tlsCertificateFilePath": str(certificate),
                "tlsKeyFilePath": str(key),
                "tlsTrustCertsFilePath": str(self.authority.certificate),
            },
        )

    def _ready(self) -> bool:
        headers = {"Authorization": f"Bearer {token_of(ROLE)}"}
        request = urllib.request.Request(f"{self.web_url}/admin/v2/namespaces/public", headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=2) as answer:
                return "public/default" in json.load(answer)
        except OSError:
            return False


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    require("pulsar")
    with Guarded(tmp_path_factory.mktemp("guarded")) as broker:
        yield broker


async def check(url: str, **options: Any) -> None:
    """Append something and read it."""
    wal = await open_wal(url, request_timeout_s=10, **options)
    try:
        await wal.create_channel("a", ChannelPolicy())
        await wal.append("a", b"hello")
        reader: Any = wal.read("a", From.EARLIEST)
        assert bytes((await anext(reader))[0].payload) == b"hello"
    finally:
        await wal.close()


async def test_a_token_opens_and_none_or_a_wrong_one_is_refused(guarded: Guarded):
    url = f"{guarded.url}/public/plain"
    settings = PulsarSettings.model_validate({"authPlugin": "token", "authParams": f"token:{token_of(ROLE)}"})
    await check(url, web_url=guarded.web_url, settings=settings)
    for refused in ({}, {"token": token_of(ROLE, b"thirty-two bytes of something else")}):
        with pytest.raises(ConfigError):
            await check(url, web_url=guarded.web_url, **refused)


async def test_tls_opens_only_to_clients_that_trust_the_broker(guarded: Guarded, tmp_path: Path):
    url = f"pulsar+ssl://127.0.0.1:{guarded.tls}/public/tls?web_url=https://127.0.0.1:{guarded.web_tls}"
    trusted = str(guarded.authority.certificate)
    await check(url, token=token_of(ROLE), trusted_certificates=trusted)
    stranger = Authority(tmp_path / "stranger")
    with pytest.raises(TidewalError):
        await check(url, token=token_of(ROLE), trusted_certificates=str(stranger.certificate))
