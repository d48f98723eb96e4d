"""The container image and the compose file of three nodes: what can be seen without Docker, and with it that the image
is built and a node in it is healthy, drains, and needs no root and nothing that is writable but its data."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packages import build, copy_tree
from tidewal.cli.main import load
from tidewal.runtime.config.described import described_settings

ROOT = Path(__file__).parents[1]
HEALTHY_WITHIN_S = 120.0


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments, in order."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines()) if name]


def cluster() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((ROOT / "compose/cluster.yaml").read_text())["services"]


def test_the_node_is_not_root_and_its_base_is_pinned() -> None:
    found = instructions()
    [base] = [rest for name, rest in found if name == "ARG" and rest.startswith("PYTHON=")]
    assert re.fullmatch(r"PYTHON=3\.\d+-slim-\w+", base)
    assert [rest.partition(" AS ")[0] for name, rest in found if name == "FROM"] == ["python:${PYTHON}"] * 2
    users = [rest for name, rest in found if name == "USER"]
    assert users
    assert all(user.isdecimal() and int(user) >= 10_000 for user in users)
    last_root = max(i for i, (name, _) in enumerate(found) if name in ("RUN", "COPY"))
    assert [name for name, _ in found].index("USER") > last_root


def test_it_has_the_locked_dependencies_by_the_same_uv() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "--constraint /build/requirements.lock" in text
    [uv] = re.findall(r"^UV_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f"ARG UV={uv}\n" in text
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert sent[0] == "*"
    assert {"!dist/*.whl", "!requirements.lock"} == set(sent[1:])


def test_it_asks_for_its_health_and_names_settings_and_options_that_there_are() -> None:
    found = dict(instructions())
    assert re.search(r'CMD tidewal status "\$\{TIDEWAL__WAL:-/var/lib/tidewal\}"$', found["HEALTHCHECK"])
    [*_, command] = [rest for name, rest in instructions() if name == "CMD"]
    given = [yaml.safe_load(command), *(node["command"] for node in cluster().values())]
    known = {option for parameter in load("run").params for option in parameter.opts}
    for name, *arguments in given:
        assert name == "run"
        assert {each for each in arguments if each.startswith("--")} <= known
    named = set(re.findall(r"\bTIDEWAL__\w+", (ROOT / "Dockerfile").read_text()))
    named |= {key for node in cluster().values() for key in node["environment"]}
    settings = {"TIDEWAL__" + "__".join(each.key.upper().split(".")) for each in described_settings()}
    assert named <= settings, named - settings


def test_three_nodes_differ_in_name_and_port_and_share_their_tables() -> None:
    nodes = cluster()
    assert len(nodes) == 3
    assert [node["command"][-1] for node in nodes.values()] == list(nodes)
    assert len({node["environment"]["TIDEWAL__METRICS__PORT"] for node in nodes.values()}) == 3
    assert len({str(node["volumes"]) for node in nodes.values()}) == 1
    for node in nodes.values():
        assert node["read_only"]
        assert node["cap_drop"] == ["ALL"]
        assert node["depends_on"] == {"kafka": {"condition": "service_healthy"}}
        assert node["environment"]["TIDEWAL__WAL"] == "kafka://127.0.0.1:9092"
    assert "kafka" in yaml.safe_load((ROOT / "compose/compose.yaml").read_text())["services"]


def test_the_release_publishes_the_image_of_the_wheel_that_it_publishes() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    image = jobs["image"]
    assert image["needs"] == "publish"
    assert image["permissions"] == {"contents": "read", "packages": "write"}
    assert any(step.get("uses", "").startswith("actions/download-artifact@") for step in image["steps"])
    commands = "\n".join(step.get("run", "") for step in image["steps"])
    assert "docker build" in commands
    assert "docker push" in commands


@functools.cache
def why_no_docker() -> str:
    """Why nothing can be built here; "" where it can."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    done = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False, timeout=60)
    return "" if done.returncode == 0 else "docker does not run: " + (done.stderr.strip().splitlines() or ["?"])[-1]


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_in_the_image_is_healthy_with_a_read_only_root_and_drains(tmp_path: Path) -> None:
    if why := why_no_docker():
        pytest.skip(why)
    tree = copy_tree(tmp_path / "tree")
    build(tree)
    docker("build", "--tag", "tidewal:test", str(tree))
    node = docker("run", "--detach", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "tidewal:test")
    try:
        end_s = time.monotonic() + HEALTHY_WITHIN_S
        while (state := docker("inspect", "--format", "{{.State.Health.Status}}", node)) == "starting":
            assert time.monotonic() < end_s, docker("logs", node)
            time.sleep(1)
        assert state == "healthy", docker("logs", node)
        assert docker("exec", node, "id", "-u") == "10001"
        docker("stop", "--time", "60", node)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", node) == "0", docker("logs", node)
    finally:
        docker("rm", "--force", "--volumes", node)


@pytest.mark.slow
def test_compose_takes_the_files_of_the_cluster() -> None:
    if why := why_no_docker():
        pytest.skip(why)
    files = [f"--file={ROOT / 'compose' / name}" for name in ("compose.yaml", "cluster.yaml")]
    assert {"kafka", "node-1", "node-2", "node-3"} <= set(docker("compose", *files, "config", "--services").split())
