"""`tidewal verify cluster`: what it says where all held, and where something did not."""

from __future__ import annotations

import json

import pytest

from tests.commands import Command
from tidewal.cli.verify_cluster import VIOLATED
from tidewal.runtime.cluster.membership import NodeMembership


def test_clusters_that_hold_are_counted(command: Command) -> None:
    status, out, _ = command("verify", "cluster", "--seeds", "2", "--nodes", "4", "--json")
    verdict = json.loads(out)
    assert status == 0
    assert verdict["held"]
    assert verdict["clusters"] == 2
    assert verdict["acknowledged"] > 100
    assert verdict["faults"] > 10


def test_a_violation_is_printed_with_its_seed_and_what_came_before(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeMembership, "holds", lambda self: True)
    status, out, _ = command("verify", "cluster", "--seeds", "500")
    assert status == VIOLATED
    assert "seed " in out
    assert '"kind": "acked"' in out or '"kind": "promised"' in out
    assert "violated; " in out
