"""Who holds the lock of a node's file knows that the process before it is dead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tidewal.runtime.cluster.incarnation_file import incarnation_file

HOLD = """
import sys, pathlib
from tidewal.runtime.cluster.incarnation_file import incarnation_file
with incarnation_file(pathlib.Path(sys.argv[1])) as file:
    file.write(sys.argv[2])
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_first_has_no_predecessor_and_the_next_one_has_it(tmp_path: Path) -> None:
    for predecessor, incarnation in (("", "n-1"), ("n-1", "n-2"), ("n-2", "n-3")):
        with incarnation_file(tmp_path / "made" / "node.lock") as file:
            assert file is not None
            assert file.predecessor == predecessor
            file.write(incarnation)


def test_nothing_is_known_while_the_process_lives_and_its_name_is_once_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "node.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), "n-1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with incarnation_file(path) as file:
            assert file is None
        holder.kill()
        holder.wait()
    with incarnation_file(path) as file:
        assert file is not None
        assert file.predecessor == "n-1"


def test_what_another_machine_has_written_says_nothing_here(tmp_path: Path) -> None:
    path = tmp_path / "node.lock"
    path.write_text("elsewhere\nn-1")
    with incarnation_file(path) as file:
        assert file is not None
        assert file.predecessor == ""


def test_a_file_that_cannot_be_made_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    with incarnation_file(tmp_path / "a file" / "node.lock") as file:
        assert file is None
