"""The workflows do what `.ci/run` does, and on what the package says it supports."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.brokers import go_programs

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".github" / "workflows"


def workflow(name: str) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as True.
    return {"on" if key is True else key: value for key, value in yaml.safe_load((FOLDER / name).read_text()).items()}


def commands(name: str) -> list[str]:
    """Each line that the jobs of a workflow run."""
    jobs = workflow(name)["jobs"].values()
    return [line for job in jobs for step in job.get("steps", ()) for line in step.get("run", "").splitlines()]


def test_check_and_test_run_what_ci_runs() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    of_ci = {line for line in lines if line.startswith("make ")}
    assert of_ci
    ran = [*commands("check.yml"), *commands("test.yml")]
    assert set(ran) == of_ci | {"make quick"}
    exported = dict(re.findall(r"^export (\w+)=(\w+)$", "\n".join(lines), re.MULTILINE))
    assert workflow("test.yml")["env"] == exported


@pytest.mark.parametrize("name", ["check.yml", "test.yml", "release.yml"])
def test_every_target_exists(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in commands(name):
        if line.startswith("make "):
            assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), line


def test_what_tests_need_of_go_is_built_where_all_tests_run() -> None:
    steps = workflow("test.yml")["jobs"]["all"]["steps"]
    uses = [step.get("uses", "").partition("@")[0] for step in steps]
    place = uses.index("actions/setup-go")
    assert place < [step.get("run") for step in steps].index("make test-all")
    given = steps[place]["with"]
    modules = {go_programs.MODULES[program].module.relative_to(ROOT) for program in go_programs.FOR_TESTS}
    assert {Path(sums).parent for sums in given["cache-dependency-path"].split()} == modules

    def needed(module: Path) -> tuple[int, ...]:
        (version,) = re.findall(r"^go ([\d.]+)$", (ROOT / module / "go.mod").read_text(), re.MULTILINE)
        return tuple(map(int, version.split(".")))

    assert needed(Path(given["go-version-file"]).parent) == max(map(needed, modules))


def test_quick_tests_run_on_each_python_that_is_promised() -> None:
    matrix = workflow("test.yml")["jobs"]["quick"]["strategy"]["matrix"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    promised = [found[1] for each in classifiers if (found := re.fullmatch(r".* :: (3\.\d+)", each))]
    assert matrix["python"] == promised
    assert matrix["os"] == ["ubuntu-latest", "macos-latest"]


def test_nothing_is_published_unless_all_is_checked_and_without_a_password() -> None:
    release = workflow("release.yml")
    jobs = release["jobs"]
    assert release["on"] == {"push": {"tags": ["v*"]}}
    assert [jobs[name]["uses"] for name in ("check", "test")] == [
        f"./{FOLDER.relative_to(ROOT)}/{n}.yml" for n in ("check", "test")
    ]
    assert jobs["build"]["needs"] == ["check", "test"]
    assert "make dist" in commands("release.yml")
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (FOLDER / "release.yml").read_text()
    assert all(workflow(name)["on"].get("workflow_call", 0) is None for name in ("check.yml", "test.yml"))


@pytest.mark.parametrize("name", ["check.yml", "test.yml", "release.yml"])
def test_no_workflow_may_write_to_the_repository(name: str) -> None:
    assert workflow(name)["permissions"] == {"contents": "read"}
