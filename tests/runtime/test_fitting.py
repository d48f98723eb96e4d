"""Defaults that depend on the log."""

from __future__ import annotations

from dataclasses import replace

from tidewal.runtime.config.fitting import fitted
from tidewal.runtime.config.settings import ClusterSettings, CommonSettings, Settings
from tidewal.runtime.testing import MemoryWal

CHEAP = MemoryWal.capabilities
COSTLY = replace(CHEAP, costly_appends=True)


def test_leases_are_longer_where_appends_are_paid_for() -> None:
    settings = fitted(Settings(), COSTLY)
    assert (settings.cluster.lease_ms, settings.cluster.renew_ms) == (15_000, 5_000)
    assert settings.common.graceful_time == 25_000
    assert fitted(Settings(), CHEAP) == Settings()


def test_what_was_given_stays() -> None:
    given = Settings(cluster=ClusterSettings(lease_ms=4_000), common=CommonSettings(graceful_time=5_000))
    assert fitted(given, COSTLY) == given


def test_of_other_sections_nothing_changes() -> None:
    given = Settings(tables="/srv/tables", cluster=ClusterSettings(id="here"))
    settings = fitted(given, COSTLY)
    assert (settings.tables, settings.cluster.id, settings.cluster.lease_ms) == ("/srv/tables", "here", 15_000)
