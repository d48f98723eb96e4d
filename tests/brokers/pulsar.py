"""Real Pulsar on 127.0.0.1: broker, bookie and metadata in one process that can be killed."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from . import facts, jars
from .processes import Process, free_ports

READY_WITHIN_S = 90.0
STOPPED_WITHIN_S = 10.0
ANSWER_WITHIN_S = 2.0
LOG4J = Path(__file__).with_name("log4j2.xml")

# The host in the URL is an address, so no proxy of the environment may come between.
_web = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class PulsarStandalone:
    """One node of Pulsar, on ports and in a folder of its own; a context manager that starts and stops it.

    Its log is `pulsar.log` in `directory`; the data folder is removed by `stop`. What waits blocks (see `Process`).
    """

    def __init__(
        self,
        directory: Path,
        *,
        deduplication: bool = True,
        settings: Mapping[str, str] | None = None,
        archive: Path | None = None,
    ) -> None:
        """`deduplication` is the broker's default for all namespaces; `settings` go over those of facts.py.

        To have clients come through a proxy, name its port in `advertisedListeners=proxy:pulsar://127.0.0.1:…`, with
        `internalListenerName=proxy` and an empty `advertisedAddress`.
        """
        found = jars.find("pulsar")
        self.directory = directory
        self._port, self._web_port, self._bookie_port = free_ports(3)
        self._settings = {"brokerDeduplicationEnabled": str(deduplication).lower(), **(settings or {})}
        self._process = Process(
            found.command(
                *facts.PULSAR_JAVA_OPTIONS,
                facts.temporary_files(self._folder),
                f"-Dlog4j2.configurationFile={LOG4J}",
                "org.apache.pulsar.PulsarStandaloneStarter",
                *("--config", str(self._folder / "standalone.conf")),
                *("--no-functions-worker", "--no-stream-storage"),
                *("--bookkeeper-port", str(self._bookie_port)),
                *("--bookkeeper-dir", str(self._folder / "bookkeeper")),
                *("--metadata-dir", str(self._folder / "metadata")),
                archive=archive,
            ),
            directory / "pulsar.log",
        )

    @property
    def url(self) -> str:
        """Where clients connect; Tidewal's URL is the same."""
        return f"pulsar://127.0.0.1:{self._port}"

    @property
    def web_url(self) -> str:
        """Where Pulsar's administration answers, without a slash at the end."""
        return f"http://127.0.0.1:{self._web_port}"

    def start(self) -> None:
        """Start it and wait until the namespace public/default is there."""
        self._folder.mkdir(parents=True)
        own = {
            "brokerServicePort": str(self._port),
            "webServicePort": str(self._web_port),
            "bindAddress": "127.0.0.1",
            "advertisedAddress": "127.0.0.1",
            "listeningInterface": "lo",  # the bookie's; without it the bookie listens everywhere
        }
        (self._folder / "standalone.conf").write_text(
            facts.properties(facts.PULSAR_SETTINGS, facts.PULSAR_TEST_SETTINGS, own, self._settings)
        )
        self.restart()

    def stop(self, within_s: float = STOPPED_WITHIN_S, *, keep: bool = False) -> None:
        """End it, with SIGKILL where it takes longer, and remove its data unless it is to `keep`."""
        self._process.stop(within_s)
        if not keep:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self._process.kill()

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT."""
        self._process.resume()

    def terminate(self) -> None:
        """SIGTERM; returns when it has ended."""
        self._process.stop(STOPPED_WITHIN_S)

    def restart(self) -> None:
        """Start it after its end, with its data and its ports, and wait until it is ready."""
        self._process.start()
        self._process.until(self._ready, READY_WITHIN_S, "Pulsar was ready")

    def recover(self) -> None:
        """Resume or restart it, where a test has left it otherwise."""
        if self._process.paused:
            self.resume()
        elif not self._process.running:
            self.restart()

    def running(self) -> bool:
        """Whether its process is there, paused or not."""
        return self._process.running

    def pid(self) -> int:
        """The number of its process, also after its end."""
        return self._process.pid

    @property
    def _folder(self) -> Path:
        return self.directory / "pulsar"

    def _ready(self) -> bool:
        """Its port for clients opens two seconds before topics can be made."""
        try:
            with _web.open(f"{self.web_url}/admin/v2/namespaces/public", timeout=ANSWER_WITHIN_S) as answer:
                return "public/default" in json.load(answer)
        except (OSError, urllib.error.HTTPError):
            return False
