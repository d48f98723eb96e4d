"""What is published: the wheel and the sdist hold the package and what belongs to it, and say what a user looks for."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tidewal.cli.monitoring import SHIPPED

from . import packages

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("package")]

FLOORS = ("runtime", "adapters", "actors", "spark_bridge", "cli")
OF_THE_ROOT = ("__init__.py", "__main__.py", "errors.py", "py.typed")
OF_COMPOSE = tuple(f"compose/{name}" for name in SHIPPED)
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md")
MADE_BY_THE_BUILD = ("PKG-INFO", "setup.cfg")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packages.copy_tree(tmp_path_factory.mktemp("package") / "tree")


@pytest.fixture(scope="module")
def built(tree: Path) -> dict[str, Path]:
    """The packages by their suffix."""
    return {path.suffix: path for path in packages.build(tree)}


def of_the_floors() -> list[str]:
    return [name for name in packages.tracked_files() if name.split("/")[0] in FLOORS and name.endswith(".py")]


def modules_in(wheel: Path) -> list[str]:
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)


def metadata_of(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_each_module_once_and_nothing_else_of_the_tree(built: dict[str, Path]) -> None:
    expected = [f"tidewal/{name}" for name in (*of_the_floors(), *OF_THE_ROOT, *OF_COMPOSE)]
    assert modules_in(built[".whl"]) == sorted([*expected, "pyspark_tidewal.py"])


def test_the_sdist_holds_the_package_its_pages_and_what_builds_it(built: dict[str, Path]) -> None:
    with tarfile.open(built[".gz"]) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    building = ("MANIFEST.in", "pyproject.toml", "setup.py", "pyspark_tidewal.py")
    wanted = {*of_the_floors(), *OF_THE_ROOT, *OF_COMPOSE, *PAGES, *building, *MADE_BY_THE_BUILD}
    assert {name for name in names if not name.startswith("tidewal.egg-info/")} == wanted


def test_a_wheel_built_from_the_sdist_is_the_wheel_of_the_tree(built: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(built[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    (wheel,) = packages.build(tree, "--wheel")
    assert modules_in(wheel) == modules_in(built[".whl"])
    assert metadata_of(wheel).as_string() == metadata_of(built[".whl"]).as_string()


def test_an_index_takes_the_packages(built: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_metadata_say_what_it_is_and_where_to_read_on(built: dict[str, Path]) -> None:
    metadata = metadata_of(built[".whl"])
    project = tomllib.loads((packages.ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["Summary"] == project["description"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {each.partition(",")[0] for each in metadata.get_all("Project-URL", [])} == set(project["urls"])
    assert set(metadata["Keywords"].split(",")) == set(project["keywords"])
    pythons = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)}
    assert pythons <= set(metadata.get_all("Classifier", []))
    assert set(metadata.get_all("Provides-Extra", [])) == {
        *("all", "kafka", "node", "objects", "pulsar", "spark", "testing")
    }


def test_no_link_of_the_page_on_an_index_is_relative(built: dict[str, Path]) -> None:
    page = metadata_of(built[".whl"]).get_payload()
    assert isinstance(page, str)
    assert "](docs/" not in page
    assert "/docs/guarantees.md)" in page
