"""The house itself: the direction of imports, what is packed, what is locked, and what no file may name."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("runtime", "adapters", "actors", "spark_bridge", "cli")

# Written in parts, so that this file does not name them either.
REGISTRY_HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("files", "pythonhosted", "org"),
        ("registry", "npmjs", "org"),
        ("crates", "io"),
        ("proxy", "golang", "org"),
        ("repo1", "maven", "org"),
        ("repo", "maven", "apache", "org"),
        ("deb", "debian", "org"),
    )
)


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def files_of_the_repository() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def lint_imports(folder: Path, config: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--config", str(config)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_imports_go_one_way():
    result = lint_imports(ROOT, ROOT / "pyproject.toml")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("runtime", "actors"),
        ("runtime", "adapters"),
        ("actors", "adapters"),
        ("adapters", "actors"),
        ("spark_bridge", "actors"),
        ("actors", "cli"),
    ],
)
def test_an_import_the_other_way_is_found(tmp_path: Path, importer: str, imported: str):
    """The rules of pyproject.toml, held against a small tree that breaks one of them."""
    contract = project()["tool"]["importlinter"]["contracts"][0]
    package = tmp_path / "sample"
    for floor in FLOORS:
        (package / floor).mkdir(parents=True)
        (package / floor / "__init__.py").write_text(f"from .. import {imported}\n" if floor == importer else "")
    (package / "__init__.py").write_text("")
    config = tmp_path / "contract.toml"
    config.write_text(
        "[tool.importlinter]\nroot_package = 'sample'\n[[tool.importlinter.contracts]]\n"
        f"name = 'one way'\ntype = {contract['type']!r}\ncontainers = ['sample']\nlayers = {contract['layers']!r}\n"
    )
    result = lint_imports(tmp_path, config)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"sample.{importer}" in result.stdout


def test_every_package_is_packed_and_every_packed_one_exists():
    setuptools = project()["tool"]["setuptools"]
    found = {path.parent.relative_to(ROOT) for floor in FLOORS for path in (ROOT / floor).rglob("__init__.py")}
    expected = {"tidewal", *(".".join(("tidewal", *folder.parts)) for folder in found)}
    assert set(setuptools["packages"]) == expected
    folders = {name: "/".join(name.split(".")[1:]) or "." for name in expected}
    assert setuptools["package-dir"] == folders


def test_every_module_lies_in_a_packed_package():
    """A folder of modules without `__init__.py` works from the tree and is missing from the wheel."""
    packed = {ROOT / folder for folder in project()["tool"]["setuptools"]["package-dir"].values()}
    modules = [path for path in files_of_the_repository() if path.suffix == ".py"]
    of_the_floors = [path for path in modules if path.relative_to(ROOT).parts[0] in FLOORS]
    assert of_the_floors
    assert [str(path) for path in of_the_floors if path.parent not in packed] == []


@pytest.mark.parametrize("scheme", ["memory", "rocksmq"])
def test_a_backend_is_found_by_its_scheme(scheme: str):
    (found,) = entry_points(group="tidewal.wal", name=scheme)
    assert found.load().name == scheme


def test_the_lock_holds_every_requirement_with_hashes():
    declared = project()
    wanted = declared["project"]["dependencies"]
    for each in (*declared["project"]["optional-dependencies"].values(), *declared["dependency-groups"].values()):
        wanted += [requirement for requirement in each if not requirement.startswith("tidewal[")]
    lock = (ROOT / "requirements.lock").read_text()
    entries = re.findall(r"^([a-z0-9-]+)==(?:.*\\\n)(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", lock, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^[a-z0-9-]+==", lock, re.MULTILINE)), "an entry has no hash"
    names = {re.match(r"[A-Za-z0-9_-]+", each)[0].lower().replace("_", "-") for each in wanted}
    assert names <= set(entries)


@pytest.mark.slow
def test_no_file_names_a_registry():
    hosts = re.compile("|".join(rf"\b{re.escape(host)}\b" for host in REGISTRY_HOSTS), re.IGNORECASE)
    assert hosts.search("https://" + REGISTRY_HOSTS[0] + "/simple")
    naming = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files_of_the_repository()
        if (match := hosts.search(path.read_text(errors="replace")))
    ]
    assert naming == []


def test_the_groups_of_tests_reach_the_scheduler(request: pytest.FixtureRequest) -> None:
    """pytest-xdist hands a group over as the end of the test's id. Where pytest ignores that, each process starts each
    broker and a Spark of its own, and the run takes twice as long."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("only where several processes run tests")
    assert request.node.nodeid.endswith("@tests/test_layout.py")
