"""MinIO as a process."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.brokers.processes import Process, free_ports
from tests.brokers.woodpecker import KEY, Server, in_bucket


class Minio(Server):
    """An S3 store over a folder, which outlives it. It syncs what it stores to disk."""

    def __init__(self, program: Path, directory: Path) -> None:
        self._port, console = free_ports(2)
        command = [str(program), "server", "--quiet", "--address", f"127.0.0.1:{self._port}"]
        command += ["--console-address", f"127.0.0.1:{console}", str(directory / "objects")]
        owner = [f"MINIO_ROOT_USER={KEY}", f"MINIO_ROOT_PASSWORD={KEY}"]
        self.process = Process(["env", *owner, *command], directory / "s3.log")

    @property
    def settings(self) -> dict[str, Any]:
        """Of a sidecar whose segments are in a bucket here."""
        return in_bucket(self._port)

    def _answers(self) -> bool:
        web = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with web.open(f"http://127.0.0.1:{self._port}/minio/health/ready", timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            return False
