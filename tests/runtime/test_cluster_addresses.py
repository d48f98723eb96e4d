"""What settings of addresses are taken, and what is asked for in return."""

from __future__ import annotations

import pytest

from tidewal.runtime.config.loading import load_settings
from tidewal.runtime.config.settings import ClusterSettings
from tidewal.runtime.errors import ConfigError

FILES = {"ssl": {"tlsCert": "c", "tlsKey": "k", "tlsCaCert": "a"}}
SECRET = {"secret": "s"}


@pytest.mark.parametrize(
    "given",
    [
        {},
        FILES,
        {**SECRET, "listen": "127.0.0.1:0"},
        {**SECRET, "address": "[::1]:7400"},
        {**SECRET, **FILES, "listen": "0.0.0.0:7400", "address": "node-1:7400"},
        {**SECRET, "listen": "0.0.0.0:7400", "address": "node-1:7400", "plaintext": True},
    ],
)
def test_taken(given) -> None:
    ClusterSettings.model_validate(given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"listen": "127.0.0.1:7400"}, "needs a secret"),
        ({**SECRET, "listen": "0.0.0.0:7400"}, "needs an address"),
        ({**SECRET, "listen": "[::]:7400", **FILES}, "needs an address"),
        ({**SECRET, "address": "node-1:7400"}, "needs certificates"),
        ({**SECRET, "listen": "node-1"}, "is no address"),
        ({"ssl": {"tlsCert": "c"}}, "needs all of"),
    ],
)
def test_refused(given, why, tmp_path) -> None:
    with pytest.raises(ConfigError, match=why):
        load_settings(None, arguments={f"cluster.{key}": value for key, value in flat(given)})


def flat(given):
    for key, value in given.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", each) for inner, each in value.items())
        else:
            yield key, value
