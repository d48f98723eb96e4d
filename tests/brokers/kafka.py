"""Real Kafka on 127.0.0.1: nodes that are broker and controller (KRaft), each a process that can be killed."""

from __future__ import annotations

import base64
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from . import facts, jars
from .kafka_wire import Metadata, Partition, metadata, quorum_leader
from .processes import BrokerFailed, Process, free_ports

READY_WITHIN_S = 60.0
STOPPED_WITHIN_S = 8.0  # without a quorum of controllers the last nodes wait for one
FORMATTED_WITHIN_S = 60.0
KNOWN_WITHIN_S = 60.0  # of a new topic, to each node


class KafkaCluster:
    """A cluster of one node or three, on ports and in a folder of its own; a context manager that starts and stops it.

    The nodes are numbered from 1. Logs are `node-1.log` and so on in `directory`; data folders are removed by `stop`.
    What waits blocks (see `Process`).
    """

    def __init__(
        self, directory: Path, nodes: int = 1, settings: Mapping[str, str] | None = None, archive: Path | None = None
    ) -> None:
        """`settings` go over those of facts.py; `archive` is where classes are archived at the end, for the cache.

        To have the clients of one node come through a proxy, name its port in `advertised.listeners`.
        """
        self._jars = jars.find("kafka")
        self.nodes = tuple(range(1, nodes + 1))
        self.directory = directory
        ports = iter(free_ports(2 * nodes))
        self._ports = {node: (next(ports), next(ports)) for node in self.nodes}
        self._settings = {**facts.kafka_replication(nodes), **(settings or {})}
        options = (*facts.JAVA_OPTIONS, "-Dorg.slf4j.simpleLogger.showDateTime=true")
        self._processes = {
            node: Process(
                self._jars.command(
                    *options,
                    facts.temporary_files(self._folder(node)),
                    "kafka.Kafka",
                    str(self._folder(node) / "server.properties"),
                    archive=archive,
                ),
                directory / f"node-{node}.log",
            )
            for node in self.nodes
        }

    @property
    def bootstrap(self) -> str:
        """Where clients connect: the addresses of all nodes, those that are down included."""
        return ",".join(f"127.0.0.1:{client}" for client, _ in self._ports.values())

    @property
    def url(self) -> str:
        """The same for Tidewal."""
        return f"kafka://{self.bootstrap}"

    def start(self) -> None:
        """Start all nodes and wait until each answers and knows all."""
        template = self._jars.make("formatted", self._format)
        for node in self.nodes:
            self._write_folder(node, template)
        for process in self._processes.values():
            process.start()
        for node in self.nodes:
            self._until_ready(node, frozenset(self.nodes))

    def stop(self, within_s: float = STOPPED_WITHIN_S, *, keep: bool = False) -> None:
        """End all nodes, with SIGKILL those that take longer, and remove their data unless it is to `keep`."""
        for process in self._processes.values():
            process.ask_to_end()
        for process in self._processes.values():
            process.stop(within_s)
        for node in () if keep else self.nodes:
            shutil.rmtree(self._folder(node), ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def kill(self, node: int = 1) -> None:
        """SIGKILL; returns when the process is gone. The others notice after the session's timeout (3 s)."""
        self._processes[node].kill()

    def pause(self, node: int = 1) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        self._processes[node].pause()

    def resume(self, node: int = 1) -> None:
        """SIGCONT."""
        self._processes[node].resume()

    def terminate(self, node: int = 1) -> None:
        """SIGTERM: it hands over what it leads before it ends; returns when it has ended."""
        self._processes[node].stop(STOPPED_WITHIN_S)

    def restart(self, node: int = 1) -> None:
        """Start a node that has ended, with its data and its ports, and wait until it takes part again."""
        self._processes[node].start()
        self._until_ready(node, frozenset({node}))

    def recover(self) -> None:
        """Resume and restart whatever a test has left otherwise."""
        for process in self._processes.values():
            if process.paused:
                process.resume()
            elif not process.running:
                process.start()
        for node in self.nodes:
            self._until_ready(node, frozenset({node}))

    def running(self, node: int = 1) -> bool:
        """Whether its process is there, paused or not."""
        return self._processes[node].running

    def pid(self, node: int = 1) -> int:
        """The number of its process, also after its end."""
        return self._processes[node].pid

    def metadata(self, *topics: str) -> Metadata:
        """What the first node that answers knows. One that has ended is listed until its session is over."""
        for node in self.nodes:
            if self.running(node):
                try:
                    return metadata(self._address(node), topics)
                except OSError:
                    continue
        raise ConnectionError("no node answers")

    def partition(self, topic: str, number: int = 0) -> Partition:
        """Who has a partition, as the first node that answers knows, which hears of a new topic a moment late."""
        found: dict[int, Partition] = {}

        def known() -> bool:
            found.update(self.metadata(topic).topics[topic])
            return number in found

        process = next(process for process in self._processes.values() if process.running)
        process.until(known, KNOWN_WITHIN_S, f"knew partition {number} of {topic}")
        return found[number]

    def controller(self) -> int:
        """The node whose controller leads, as the first node that answers knows; -1 where none does."""
        for node in self.nodes:
            if self.running(node):
                try:
                    return quorum_leader(self._address(node))
                except OSError:
                    continue
        raise ConnectionError("no node answers")

    def _address(self, node: int) -> tuple[str, int]:
        return "127.0.0.1", self._ports[node][0]

    def _folder(self, node: int) -> Path:
        return self.directory / f"node-{node}"

    def _until_ready(self, node: int, expected: frozenset[int]) -> None:
        def ready() -> bool:
            try:
                return expected <= metadata(self._address(node)).nodes
            except OSError:
                return False

        self._processes[node].until(ready, READY_WITHIN_S, f"Kafka's node {node} was ready")

    def _write_folder(self, node: int, template: Path) -> None:
        """What formatting leaves behind is the same for each node but for two lines: a second's work saved per node."""
        folder = self._folder(node)
        shutil.copytree(template, folder / "data")
        meta = folder / "data" / "meta.properties"
        with meta.open() as lines:
            known = facts.parse_properties(lines)
        own = {"node.id": str(node), "directory.id": base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")}
        meta.write_text(facts.properties(known, own))
        (folder / "server.properties").write_text(self._properties(node))

    def _properties(self, node: int) -> str:
        client, controller = self._ports[node]
        voters = ",".join(f"{each}@127.0.0.1:{ports[1]}" for each, ports in self._ports.items())
        own = {
            "node.id": str(node),
            "controller.quorum.voters": voters,
            "listeners": f"PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{client}",
            "log.dirs": str(self._folder(node) / "data"),
        }
        return facts.properties(facts.KAFKA_SETTINGS, facts.KAFKA_TEST_SETTINGS, own, self._settings)

    def _format(self, target: Path) -> None:
        """Format a data folder for node 1, of which those of all nodes are made."""
        settings = target.with_name("server.properties")
        own = {
            "node.id": "1",
            "controller.quorum.voters": "1@127.0.0.1:1",
            "listeners": "PLAINTEXT://127.0.0.1:2,CONTROLLER://127.0.0.1:1",
            "log.dirs": str(target),
        }
        settings.write_text(facts.properties(facts.KAFKA_SETTINGS, own))
        cluster = base64.urlsafe_b64encode(b"tidewal's tests.").decode().rstrip("=")
        command = self._jars.command("kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings))
        result = subprocess.run(command, capture_output=True, text=True, timeout=FORMATTED_WITHIN_S, check=False)
        if result.returncode != 0:
            raise BrokerFailed(f"Kafka's data folder cannot be formatted:\n{result.stdout}{result.stderr[-2000:]}")
