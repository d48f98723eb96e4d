"""What type checkers say of Tidewal: all that ships has a type that every checker reads alike, and in code that uses it
mypy and pyright find, in their strict modes, what is wrong, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
USER_CODE = sorted((ROOT / "tests" / "user_code").glob("*.py"))
TYPED_PAGES = ("actors.md",)
TYPED_EXAMPLES = ("fastapi_service/app.py",)
TYPED_TUTORIAL = "tutorials/python-developer.md"
SHIPPED = ("runtime", "adapters", "actors", "spark_bridge", "cli")
PYRIGHT = {
    "typeCheckingMode": "strict",
    "reportUnnecessaryTypeIgnoreComment": "error",
    "include": ["."],
    "extraPaths": [str(ROOT / "typings")],  # `tidewal` there is this tree
    "venvPath": str(ROOT),
    "venv": ".venv",
    "pythonVersion": "3.11",
}
NO_PYARROW_STUBS = "[mypy]\n[mypy-pyarrow.*]\nfollow_imports = skip\nfollow_imports_for_stubs = True\n"
MYPY = ("--strict", "--follow-imports", "silent", "--python-version", "3.11")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mypy keeps of the modules that it has read: most of its time goes into Tidewal and its libraries."""
    return tmp_path_factory.mktemp("mypy")


def problems(directory: Path, cache: Path) -> dict[str, list[str]]:
    """What each checker says against the modules of `directory`, which is also its working directory."""
    (directory / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    return {"pyright": errors_of(["pyright", "-p", "."], directory), "mypy": mypy(directory, cache)}


def mypy(directory: Path, cache: Path) -> list[str]:
    """What mypy says against the modules of `directory`."""
    modules = sorted(path.name for path in directory.glob("*.py"))
    return errors_of(["mypy", *MYPY, "--cache-dir", str(cache), *modules], directory)


def errors_of(command: list[str], directory: Path) -> list[str]:
    """The errors that a checker finds when it runs in `directory`."""
    checker, *arguments = command
    environment = {**os.environ, "MYPYPATH": str(ROOT / "typings")}
    ran = subprocess.run(
        [str(BIN / checker), *arguments], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    found = [line for line in ran.stdout.splitlines() if " error: " in line or " - error: " in line]
    assert (ran.returncode == 0) is (not found), ran.stdout + ran.stderr
    return found


def programs_of(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M | re.S)


def test_typed_user_code_and_typed_pages_pass_both_checkers(tmp_path: Path, cache: Path) -> None:
    for path in USER_CODE:
        shutil.copy(path, tmp_path)
    for page in TYPED_PAGES:
        programs = programs_of(page)
        assert programs, f"{page} has no program"
        for number, program in enumerate(programs):
            (tmp_path / f"{Path(page).stem}_page_{number}.py").write_text(program)
    assert problems(tmp_path, cache) == {"pyright": [], "mypy": []}


@pytest.mark.parametrize("stubs", [True, False], ids=["with stubs of pyarrow", "without"])
@pytest.mark.parametrize("example", TYPED_EXAMPLES)
def test_an_example_passes_mypy_with_stubs_of_pyarrow_and_without(
    example: str, stubs: bool, tmp_path: Path, cache: Path
) -> None:
    """pyarrow has no types of its own: to who has not installed its stubs all of it is Any."""
    pytest.importorskip("fastapi")
    shutil.copy(ROOT / "examples" / example, tmp_path)
    if not stubs:
        (tmp_path / "mypy.ini").write_text(NO_PYARROW_STUBS)
    assert mypy(tmp_path, cache) == []


@pytest.mark.parametrize("stubs", [True, False], ids=["with stubs of pyarrow", "without"])
def test_without_stubs_of_pyarrow_pyright_knows_all_but_the_table_of_a_result(stubs: bool, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    programs = {f"page_{number}.py": program for number, program in enumerate(programs_of(TYPED_TUTORIAL))}
    programs |= {path.name: path.read_text() for path in USER_CODE}
    programs |= {Path(each).name: (ROOT / "examples" / each).read_text() for each in TYPED_EXAMPLES}
    for name, program in programs.items():
        (tmp_path / name).write_text(program)
    config: dict[str, object] = {**PYRIGHT, "include": ["*.py"], "reportUnnecessaryTypeIgnoreComment": "none"}
    if not stubs:
        config |= {"venvPath": str(tmp_path), "venv": environment_without_stubs(tmp_path / "venv").name}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    found = errors_of(["pyright", "-p", "."], tmp_path)
    assert bool(found) is not stubs
    for error in found:
        match = re.search(r"(\w+\.py):(\d+):", error)
        assert match is not None
        line = int(match[2]) - 1
        assert ".table" in "".join(programs[match[1]].splitlines()[line - 1 : line + 1]), error  # there, or just before


def environment_without_stubs(directory: Path) -> Path:
    """The packages of this environment without the stubs of pyarrow."""
    packages = directory / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    packages.mkdir(parents=True)
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith(("pyarrow-stubs", "pyarrow_stubs")):
            (packages / each.name).symlink_to(each)
    return directory


def test_each_line_that_the_user_code_has_wrong_is_refused_by_both(tmp_path: Path, cache: Path) -> None:
    """So the other test does not pass because a checker found no types at all."""
    expected: set[str] = set()
    for path in USER_CODE:
        lines = path.read_text().splitlines()
        expected |= {f"{path.name}:{number}" for number, line in enumerate(lines, 1) if "# type: ignore" in line}
        (tmp_path / path.name).write_text("\n".join(line.partition("  # type: ignore")[0] for line in lines) + "\n")
    assert expected
    for checker, found in problems(tmp_path, cache).items():
        places = {match[0] for line in found if (match := re.search(r"\w+\.py:\d+", line))}
        assert places == expected, checker


def untyped(packages: Path) -> list[str]:
    """What of the `tidewal` in `packages` has no type, or one that checkers may infer in different ways."""
    # Before the folder of the environment, which has the packages that Tidewal imports, and an editable `tidewal`.
    path = os.pathsep.join([str(packages), sysconfig.get_path("purelib")])
    command = [str(BIN / "pyright"), "--pythonpath", sys.executable, "--verifytypes", "tidewal", "--ignoreexternal"]
    ran = subprocess.run(
        [*command, "--outputjson"],
        cwd=packages,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(ran.stdout)["typeCompleteness"]
    assert report["packageRootDirectory"] == str(packages / "tidewal")
    bad = [each["name"] for each in report["symbols"] if not each["isTypeKnown"] or each["isTypeAmbiguous"]]
    assert (report["completenessScore"] == 1) is (not bad)
    return bad


def test_every_name_that_ships_has_a_type_that_all_checkers_read_alike(tmp_path: Path) -> None:
    package = tmp_path / "tidewal"
    for floor in SHIPPED:
        shutil.copytree(ROOT / floor, package / floor, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "__main__.py", "errors.py", "py.typed"):
        shutil.copy(ROOT / name, package)
    assert untyped(tmp_path) == []


def test_a_name_whose_type_checkers_may_infer_differently_is_found(tmp_path: Path) -> None:
    package = tmp_path / "tidewal"
    package.mkdir()
    (package / "py.typed").touch()
    (package / "__init__.py").write_text("import time\n\nnow = time.monotonic()\nthen: float = now\n")
    assert untyped(tmp_path) == ["tidewal.now"]
