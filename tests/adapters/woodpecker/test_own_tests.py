"""The sidecar's own tests, in Go."""

from __future__ import annotations

import pytest

from tests.brokers import go_programs
from tests.brokers.woodpecker_fixtures import require_program


@pytest.mark.slow
@pytest.mark.long  # Go compiles the module once more, with its tests
def test_the_sidecar_passes_its_own_tests() -> None:
    require_program("sidecar")
    ended = go_programs.own_tests("sidecar")
    assert ended.returncode == 0, ended.stdout + ended.stderr
