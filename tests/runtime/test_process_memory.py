"""The memory of a process, and how much it may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidewal.runtime.process_memory import memory_limit_bytes, resident_bytes

MIB = 1024 * 1024


def test_a_process_knows_what_it_has_and_may_have() -> None:
    before = resident_bytes()
    assert MIB < before < memory_limit_bytes()
    more = bytearray(b"x" * (64 * MIB))
    assert resident_bytes() - before > 32 * MIB
    del more


@pytest.mark.parametrize(("said", "limit"), [("1048576\n", MIB), ("max\n", 0), ("9223372036854771712\n", 0), ("", 0)])
def test_the_limit_of_the_container_goes_before_that_of_the_machine(tmp_path: Path, said: str, limit: int) -> None:
    (tmp_path / "memory.max").write_text(said)
    machine = memory_limit_bytes(())
    assert memory_limit_bytes((tmp_path / "nothing", tmp_path / "memory.max")) == (limit or machine) > 0


@pytest.mark.parametrize("said", [None, "", "1", "x y z"])
def test_where_the_system_does_not_say_there_is_no_number(tmp_path: Path, said: str | None) -> None:
    if said is not None:
        (tmp_path / "statm").write_text(said)
    assert resident_bytes(tmp_path / "statm") == 0
