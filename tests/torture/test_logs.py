"""Which logs have a turn on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.brokers.jars import Missing

from . import logs


def test_a_log_has_no_turn_while_one_of_its_programs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    built = {"etcd"}

    def find(program: str) -> Path:
        if program not in built:
            raise Missing(program)
        return Path(program)

    monkeypatch.setattr(logs, "find_program", find)
    assert logs.logs_in_turn() == ["kafka", "pulsar", "rocksmq"]
    built.add("versitygw")
    assert logs.logs_in_turn() == ["kafka", "objects", "pulsar", "rocksmq"]
    built.add("sidecar")
    assert logs.logs_in_turn() == ["kafka", "objects", "pulsar", "rocksmq", "woodpecker"]
