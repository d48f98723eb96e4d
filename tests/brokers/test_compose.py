"""compose/ starts what the tests start: the same versions, limits and settings. Read, not run: no containers needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from tidewal.adapters.woodpecker.settings import WoodpeckerSettings

from . import facts

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
SIDECAR = ROOT / "sidecars/woodpecker"
POM = "{http://maven.apache.org/POM/4.0.0}"
# Where brokers listen and keep data differs, of course; `properties` of the two files are compared without these.
PLACES = {
    "kafka": {"node.id", "controller.quorum.voters", "listeners", "advertised.listeners", "log.dirs"},
    "pulsar": {"brokerServicePort", "webServicePort", "bindAddress", "advertisedAddress", "listeningInterface"},
}


@pytest.fixture(scope="module")
def services() -> dict[str, dict]:
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]


def settings(services: dict[str, dict], name: str) -> dict[str, str]:
    """The settings in the file that the service mounts in place of its own."""
    (path,) = (volume.split(":")[0] for volume in services[name]["volumes"] if name in volume and "./" in volume)
    return facts.parse_properties((COMPOSE / path).read_text().splitlines())


def without_places(found: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in found.items() if key not in PLACES[name]}


def test_kafka_has_the_settings_of_the_tests(services: dict[str, dict]):
    expected = {**facts.KAFKA_SETTINGS, **facts.kafka_replication(1)}
    assert without_places(settings(services, "kafka"), "kafka") == expected


def test_pulsar_has_the_settings_of_the_tests(services: dict[str, dict]):
    assert without_places(settings(services, "pulsar"), "pulsar") == facts.PULSAR_SETTINGS


def test_a_message_of_five_mebibytes_passes_each_limit(services: dict[str, dict]):
    kafka, pulsar = settings(services, "kafka"), settings(services, "pulsar")
    overhead = 64 * 1024
    assert facts.MESSAGE_BYTES == 5 * 1024 * 1024
    for limit in (kafka["message.max.bytes"], kafka["replica.fetch.max.bytes"], pulsar["maxMessageSize"]):
        assert int(limit) >= facts.MESSAGE_BYTES + overhead
    assert int(pulsar["nettyMaxFrameSizeBytes"]) >= int(pulsar["maxMessageSize"]) + overhead


@pytest.mark.parametrize(("name", "group"), [("kafka", "org.apache.kafka"), ("pulsar", "org.apache.pulsar")])
def test_the_images_are_of_the_version_that_is_tested(services: dict[str, dict], name: str, group: str):
    pom = ElementTree.parse(ROOT / f"tests/brokers/poms/{name}.xml")
    versions = {
        each.findtext(f"{POM}version")
        for each in pom.iter(f"{POM}dependency")
        if each.findtext(f"{POM}groupId") == group
    }
    assert {services[name]["image"].rpartition(":")[2]} == versions


def test_clients_find_them_at_the_usual_ports_of_this_machine_alone(services: dict[str, dict]):
    assert services["kafka"]["ports"] == [f"127.0.0.1:{facts.KAFKA_PORT}:{facts.KAFKA_PORT}"]
    ports = (facts.PULSAR_PORT, facts.PULSAR_WEB_PORT)
    assert services["pulsar"]["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports]
    kafka, pulsar = settings(services, "kafka"), settings(services, "pulsar")
    assert kafka["advertised.listeners"] == f"PLAINTEXT://127.0.0.1:{facts.KAFKA_PORT}"
    assert f"PLAINTEXT://:{facts.KAFKA_PORT}" in kafka["listeners"]
    assert (pulsar["brokerServicePort"], pulsar["webServicePort"]) == tuple(map(str, ports))
    assert pulsar["advertisedAddress"] == "127.0.0.1"
    for name in ("prometheus", "grafana"):
        assert "127.0.0.1" in str(services[name])


def test_every_file_that_is_mounted_is_there(services: dict[str, dict]):
    mounted = [volume for service in services.values() for volume in service["volumes"] if volume.startswith("./")]
    assert mounted
    for volume in mounted:
        assert (COMPOSE / volume.split(":")[0]).exists(), volume


def test_grafana_asks_the_prometheus_that_scrapes_tidewal(services: dict[str, dict]):
    prometheus = yaml.safe_load((COMPOSE / "prometheus/prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert f"--metrics-port {target.rpartition(':')[2]}" in (COMPOSE / "README.md").read_text()
    (rules,) = prometheus["rule_files"]
    assert (COMPOSE / "prometheus" / Path(rules).name).exists()
    (source,) = yaml.safe_load((COMPOSE / "grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    (listening,) = re.findall(r"--web\.listen-address=(\S+)", " ".join(services["prometheus"]["command"]))
    assert source["url"] == f"http://{listening}"
    dashboard = json.loads((COMPOSE / "grafana/dashboards/tidewal.json").read_text())
    (chosen,) = [each for each in dashboard["templating"]["list"] if each["type"] == "datasource"]
    assert chosen["current"]["value"] == source["uid"]
    sources = {panel["datasource"]["uid"] for row in dashboard["panels"] for panel in row.get("panels", [])}
    assert sources == {f"${{{chosen['name']}}}"}


# ---- Woodpecker ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_sidecar() -> dict[str, Any]:
    """The file that the sidecar is given."""
    return yaml.safe_load((COMPOSE / "woodpecker/woodpecker.yaml").read_text())


def test_the_sidecar_is_told_where_etcd_and_minio_are(services: dict[str, dict], of_sidecar: dict[str, Any]):
    assert set(services["woodpecker"]["depends_on"]) == {"etcd", "minio"}
    for name in ("woodpecker", "etcd", "minio"):  # they know each other by name, and the host does not need to
        assert not {"network_mode", "ports"} & services[name].keys()
    assert of_sidecar["etcd"]["endpoints"] == ["etcd:2379"]
    assert "--listen-client-urls=http://0.0.0.0:2379" in services["etcd"]["command"]
    store, owner = of_sidecar["minio"], services["minio"]["environment"]
    assert (store["address"], store["port"]) == ("minio", 9000)
    assert (store["accessKeyID"], store["secretAccessKey"]) == tuple(owner.values())


def test_the_sidecar_knows_each_key_of_its_file(of_sidecar: dict[str, Any]):
    def check(given: dict[str, Any], known: dict[str, Any]) -> None:
        assert given.keys() <= known.keys()
        for key, value in given.items():
            if isinstance(value, dict):
                check(value, known[key])

    check(of_sidecar, yaml.safe_load((SIDECAR / "woodpecker.yaml").read_text()))


def test_the_sidecar_finds_its_file_and_folder_where_they_are_mounted(services: dict[str, dict]):
    assert services["woodpecker"]["build"] == "../sidecars/woodpecker"
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", (SIDECAR / "Dockerfile").read_text(), re.MULTILINE)
    arguments = yaml.safe_load(entry)
    options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in services["woodpecker"]["volumes"]}
    assert mounted == {
        options["-directory"]: "../" + WoodpeckerSettings().sidecar.directory,
        options["-config"]: "./woodpecker/woodpecker.yaml",
    }


def test_the_sidecar_and_etcd_are_of_the_versions_that_are_tested(services: dict[str, dict]):
    def version(module: Path, line: str) -> str:
        (found,) = re.findall(rf"^\s*{line} v?([\d.]+)", (module / "go.mod").read_text(), re.MULTILINE)
        return found

    assert f"ARG GO={version(SIDECAR, 'go')}-" in (SIDECAR / "Dockerfile").read_text()
    expected = version(ROOT / "tests/brokers/stores", "go.etcd.io/etcd/server/v3")
    assert services["etcd"]["image"].rpartition(":v")[2] == expected
