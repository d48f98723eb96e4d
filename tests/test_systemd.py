"""The unit of docs/how-to/systemd.md: systemd takes it, and a node has the time that its roles may need to stop."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tidewal.actors.standalone import ROLES
from tidewal.cli.main import load
from tidewal.runtime.config.settings import Settings

PAGE = Path(__file__).parents[1] / "docs/how-to/systemd.md"


@pytest.fixture(scope="module")
def unit() -> str:
    (found,) = re.findall(r"```ini\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(unit: str, tmp_path: Path) -> None:
    path = tmp_path / "tidewal.service"
    path.write_text(unit.replace("/opt/tidewal/bin/tidewal", sys.executable))  # a program that is there
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_waits_as_long_as_the_roles_may_take_to_stop_and_starts_what_there_is(unit: str) -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(unit)
    service, actor = parser["Service"], Settings().actor
    assert float(service["TimeoutStopSec"]) > len(ROLES) * (actor.stop_deadline + actor.stop_grace)
    program, command, *arguments = service["ExecStart"].split()
    assert (program, command) == ("/opt/tidewal/bin/tidewal", "run")
    known = {option for parameter in load("run").params for option in parameter.opts}
    assert {each for each in arguments if each.startswith("--")} <= known
