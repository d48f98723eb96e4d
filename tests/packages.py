"""`python -m tests.packages FOLDER` builds wheel and sdist from a copy of what git knows of the tree, so that nothing
else of a checkout gets into them, and the wheel from the sdist.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tracked_files() -> list[str]:
    """What git tracks, and what it would if it was added now, relative to the root."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def copy_tree(target: Path) -> Path:
    """A copy of the tree in `target`, which is new."""
    for name in tracked_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    return target


def build(tree: Path, *kinds: str) -> list[Path]:
    """Build the packages of the tree (`--wheel`, `--sdist`; both without) with what is installed; where they are."""
    command = [sys.executable, "-m", "build", "--no-isolation", *kinds, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted((tree / "dist").iterdir())


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        Path(sys.argv[1]).mkdir(exist_ok=True)
        for package in build(copy_tree(Path(scratch) / "tree")):
            shutil.copy(package, sys.argv[1])
            print(package.name)


if __name__ == "__main__":
    main()
