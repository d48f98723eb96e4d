"""The Helm chart: its values fit their schema and the code; and where helm is installed, what it makes of them."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tidewal.cli.main import load
from tidewal.runtime.cluster.roles import ROLE_NAMES
from tidewal.runtime.config.described import described_settings
from tidewal.runtime.config.loading import load_settings
from tidewal.runtime.config.settings import Settings

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts/tidewal"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
HELM = shutil.which("helm")
KUBERNETES = ("--kube-version", "1.30.0")  # else the one that this helm was built for
with_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed")


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    values = copy.deepcopy(VALUES)
    change(values)
    return values


def is_valid(values: dict[str, Any]) -> bool:
    return not list(jsonschema.Draft7Validator(SCHEMA).iter_errors(values))


def test_the_schema_takes_the_values_and_knows_each_of_them() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert is_valid(VALUES)
    assert set(SCHEMA["properties"]) == {*VALUES, "global"}
    for name in ("image", "direct", "tables", "podDisruptionBudget", "serviceMonitor"):
        assert set(SCHEMA["properties"][name]["properties"]) == set(VALUES[name])


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(wal="rocksmq:///data/log"),
        lambda v: v.update(unknown=1),
        lambda v: v["groups"].update(more={"roles": ["storage"], "replicas": 1}),
        lambda v: v["groups"].update(more={"roles": [], "replicas": 1}),
        lambda v: v["groups"].update(more={"roles": ["proxy"], "replicas": -1}),
        lambda v: v["groups"].update({"Upper case": {"roles": ["proxy"], "replicas": 1}}),
        lambda v: v["settings"].update({"cluster.leaseMs": "3000"}),
        lambda v: v["settings"].update(TIDEWAL__CLUSTER__LEASEMS=3000),
        lambda v: v["tables"].update(size="much"),
        lambda v: v["direct"].update(port="7400"),
        lambda v: v.update(terminationGracePeriodSeconds=5),
    ],
)
def test_the_schema_refuses_what_does_not_work(change: Callable[[dict[str, Any]], object]) -> None:
    assert not is_valid(changed(change))


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v["groups"].update(mixcoord=None, all={"roles": list(ROLE_NAMES), "replicas": 3}),
        lambda v: v["settings"].update(TIDEWAL__CLUSTER__LEASEMS="3000"),
        lambda v: v.update(wal="pulsar+ssl://broker:6651/public/tidewal"),
    ],
)
def test_the_schema_takes_what_works(change: Callable[[dict[str, Any]], object]) -> None:
    assert is_valid(changed(change))


def test_the_chart_fits_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert SCHEMA["definitions"]["role"]["enum"] == list(ROLE_NAMES)
    assert {role for group in VALUES["groups"].values() for role in group["roles"]} == set(ROLE_NAMES)
    check = re.search(r"list ((?:\"\w+\" ?)+)\}\}", TEMPLATES["_helpers.tpl"])
    assert check is not None
    assert re.findall(r"\w+", check[1]) == list(ROLE_NAMES)
    settings = {"TIDEWAL__" + "__".join(each.key.upper().split(".")) for each in described_settings()}
    text = "".join(TEMPLATES.values()) + (CHART / "values.yaml").read_text()
    assert set(re.findall(r"\bTIDEWAL__\w+", text)) <= settings
    known = {option for parameter in load("run").params for option in parameter.opts}
    assert set(re.findall(r"- (--\w+)=", TEMPLATES["nodes.yaml"])) <= known


def test_a_node_has_the_time_that_its_roles_may_need_to_stop_and_cannot_do_much_else() -> None:
    actor = Settings().actor
    assert VALUES["terminationGracePeriodSeconds"] > len(ROLE_NAMES) * (actor.stop_deadline + actor.stop_grace)
    guarded = ("runAsNonRoot", "readOnlyRootFilesystem")
    for line in (*(f"{each}: true" for each in guarded), "drop: [ALL]", "automountServiceAccountToken: false"):
        assert line in TEMPLATES["nodes.yaml"]


def test_each_value_is_used_and_each_that_is_used_is_there() -> None:
    used = set(re.findall(r"\$?\.Values\.(\w+)", "".join(TEMPLATES.values())))
    assert used == set(VALUES)


# ---- with helm ------------------------------------------------------------------------------------------------------


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)


def rendered(*options: str) -> list[dict[str, Any]]:
    done = helm("template", "t", str(CHART), *KUBERNETES, *options)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@with_helm
def test_helm_finds_nothing_to_say() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@with_helm
def test_each_group_is_a_deployment_that_is_drained_probed_and_guarded() -> None:
    documents = rendered("--set", "serviceMonitor.enabled=true", "--set", "settings.TIDEWAL__CLUSTER__ID=c")
    deployments = {each["metadata"]["name"]: each for each in documents if each["kind"] == "Deployment"}
    assert set(deployments) == {f"t-tidewal-{name}" for name in VALUES["groups"]}
    for name, deployment in deployments.items():
        pod = deployment["spec"]["template"]["spec"]
        [node] = pod["containers"]
        assert f"--roles={name.rpartition('-')[2]}" in node["args"]
        assert {"name": "TIDEWAL__CLUSTER__ID", "value": "c"} in node["env"]
        probes = [node[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
        assert probes == ["/healthz", "/readyz", "/metrics"]
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    budgets = [each for each in documents if each["kind"] == "PodDisruptionBudget"]
    assert [each["spec"]["maxUnavailable"] for each in budgets] == [1] * len(deployments)
    kinds = {each["kind"] for each in documents}
    assert kinds >= {"Service", "ServiceMonitor", "PersistentVolumeClaim"}


@with_helm
def test_a_cluster_without_a_role_is_refused() -> None:
    done = helm("template", "t", str(CHART), *KUBERNETES, "--set", "groups.datanode=null")
    assert done.returncode != 0
    assert "no group offers the role datanode" in done.stderr
    one = ["--set", ",".join(f"groups.{name}=null" for name in VALUES["groups"])]
    one += ["--set-json", f"groups.all={json.dumps({'roles': list(ROLE_NAMES), 'replicas': 3})}"]
    assert [each["kind"] for each in rendered(*one)].count("Deployment") == 1


SECRET = ("--set", "settings.TIDEWAL__CLUSTER__SECRET=s")


@with_helm
def test_direct_connections_have_addresses_and_certificates_or_are_refused() -> None:
    enabled = ("--set", "direct.enabled=true")
    for options, why in ((SECRET, "needs direct.tlsSecret"), (("--set", "direct.plaintext=true"), "CLUSTER__SECRET")):
        assert why in helm("template", "t", str(CHART), *KUBERNETES, *enabled, *options).stderr
    documents = rendered(*enabled, *SECRET, "--set", "direct.tlsSecret=certificates")
    pods = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment"]
    for pod in pods:
        [node] = pod["containers"]
        given = {each["name"]: each.get("value") for each in node["env"]}
        assert given["TIDEWAL__CLUSTER__ADDRESS"] == "$(POD_IP):7400"
        assert "TIDEWAL__CLUSTER__PLAINTEXT" not in given
        given = {name: str(value).replace("$(POD_IP)", "10.0.0.1") for name, value in given.items() if "__" in name}
        assert str(load_settings(environment=given).cluster.reached_at) == "10.0.0.1:7400"
        assert {"name": "tls", "secret": {"secretName": "certificates"}} in pod["volumes"]
    plain = rendered(*enabled, *SECRET, "--set", "direct.plaintext=true")
    assert "TIDEWAL__CLUSTER__PLAINTEXT" in str(plain)
