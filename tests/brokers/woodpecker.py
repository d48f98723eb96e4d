"""etcd and the sidecar of Woodpecker as processes."""

from __future__ import annotations

import json
import os
import socket
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from tidewal.adapters.rocksmq.address import socket_path

from .processes import Process, free_ports

READY_WITHIN_S = 60.0
STOPPED_WITHIN_S = 30.0
KEY = "tidewal-tests"


class Server(ABC):
    """A process that is ready once it `_answers`."""

    process: Process

    def start(self) -> None:
        self.process.start()
        self.process.until(self._answers, READY_WITHIN_S, "ready")

    def stop(self) -> None:
        self.process.stop(STOPPED_WITHIN_S)

    @abstractmethod
    def _answers(self) -> bool: ...


class Etcd(Server):
    """One node of etcd, whose data outlive it."""

    def __init__(self, program: Path, directory: Path) -> None:
        self.port, peers = free_ports(2)
        url, peer_url = f"http://{self.endpoint}", f"http://127.0.0.1:{peers}"
        command = [str(program), "--data-dir", str(directory / "etcd"), "--log-level", "warn"]
        command += ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer_url]
        command += ["--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"default={peer_url}"]
        self.process = Process(command, directory / "etcd.log")

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _answers(self) -> bool:
        web = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with web.open(f"http://{self.endpoint}/health", timeout=5) as answer:
                return json.load(answer)["health"] == "true"
        except (OSError, urllib.error.URLError):
            return False


class Sidecar(Server):
    """A sidecar for the log whose keys in etcd begin with `prefix`; its socket is in a folder of its own."""

    def __init__(self, program: Path, directory: Path, etcd: str, prefix: str, settings: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.prefix = directory, prefix
        config = directory / "config.yaml"
        woodpecker = {"meta": {"prefix": prefix}, **settings.get("woodpecker", {})}
        config.write_text(json.dumps({**settings, "woodpecker": woodpecker, "etcd": {"endpoints": [etcd]}}))
        command = [str(program), "-directory", str(directory), "-config", str(config)]
        self.process = Process(command, directory / "sidecar.log")

    @property
    def url(self) -> str:
        return f"woodpecker://{self.directory}"

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as connection, socket_path(str(self.directory)) as path:
                connection.connect(path)
        except OSError:
            return False
        return True


def local(directory: Path) -> dict[str, Any]:
    """Settings for segments in a folder."""
    return {"woodpecker": {"storage": {"type": "local", "rootPath": str(directory / "segments")}}}


def in_bucket(port: int) -> dict[str, Any]:
    """Settings for segments in the bucket `tests` of the store at a port of this machine; appends wait for company for
    20 ms, not 200."""
    store = {"address": "127.0.0.1", "port": port, "bucketName": "tests", "region": "us-east-1"}
    return {
        "woodpecker": {
            "storage": {"type": "minio"},
            "logstore": {"segmentSyncPolicy": {"maxInterval": "20ms"}},
        },
        "minio": {**store, "accessKeyID": KEY, "secretAccessKey": KEY},
    }


def has_attributes(folder: Path) -> bool:
    """Whether files there can have extended attributes."""
    try:
        os.setxattr(folder, "user.tidewal", b"")
    except (AttributeError, OSError):
        return False
    return True


class VersityGateway(Server):
    """An S3 store over a folder, which outlives it. It does not sync what it stores to disk.

    It is `atomic` where the folder can have extended attributes. Elsewhere it keeps what it knows of an object in a
    file of its own: killed between both it has an object that is neither there nor absent, for ever.
    """

    def __init__(self, program: Path, directory: Path) -> None:
        (self.port,) = free_ports(1)
        folder = directory / "objects"
        folder.mkdir()
        self.atomic = has_attributes(folder)
        command = [str(program), "--port", f"127.0.0.1:{self.port}", "--access", KEY, "--secret", KEY, "--quiet"]
        command.append("posix")
        if not self.atomic:
            attributes = directory / "attributes"
            attributes.mkdir()
            command += ["--sidecar", str(attributes)]
        self.process = Process([*command, str(folder)], directory / "s3.log")

    @property
    def settings(self) -> dict[str, Any]:
        """Of a sidecar whose segments are in a bucket here."""
        return in_bucket(self.port)

    def create_bucket(self) -> None:
        """Make the bucket `tests`."""
        import boto3  # late: all test processes import this module

        credentials = {"aws_access_key_id": KEY, "aws_secret_access_key": KEY, "region_name": "us-east-1"}
        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}", **credentials).create_bucket(Bucket="tests")

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 5).close()
        except OSError:
            return False
        return True
