"""A sidecar that this process has started."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ...runtime.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from .settings import WoodpeckerSettings

ENDED_WITHIN_S = 30.0
LOG_LINES = 3


class SidecarProcess:
    """Starts the sidecar of a folder where none runs, and ends the one that it has started.

    Of several processes that start one at once, one succeeds: the sidecar locks the folder. It survives a kill of
    this process, and serves the others.
    """

    def __init__(self, directory: str, settings: WoodpeckerSettings) -> None:
        self._directory, self._settings = Path(directory), settings
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def _log(self) -> Path:
        return self._directory / "sidecar.log"

    def start(self) -> None:
        """Start the sidecar, unless the one that this process has started runs still; returns before it answers. Raises
        `ConfigError` where the program cannot be started."""
        if self._running is not None and self._running.poll() is None:
            return
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [self._settings.sidecar.binary, "-directory", str(self._directory)]
        for file in filter(None, (self._settings.sidecar.config, self._write_settings())):
            command += ["-config", file]
        try:
            with self._log.open("ab") as log:
                self._running = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be started: {error}", key="woodpecker.sidecar.binary") from error

    def check(self) -> None:
        """Raise `Unavailable` where the sidecar has ended by itself: its log says why."""
        if self._running is not None and self._running.poll():
            lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise Unavailable(f"the sidecar has ended ({self._log}): {' '.join(lines)}", path=str(self._directory))

    async def stop(self) -> None:
        """End the sidecar that this process has started: it stores what it has accepted."""
        running, self._running = self._running, None
        if running is not None:
            running.terminate()
            try:
                await asyncio.to_thread(running.wait, ENDED_WITHIN_S)
            except subprocess.TimeoutExpired:
                running.kill()
                await asyncio.to_thread(running.wait)

    def _write_settings(self) -> str:
        """What Tidewal's settings say, as a file in Woodpecker's format."""
        meta, storage = self._settings.meta, self._settings.storage
        content = {
            "woodpecker": {
                "meta": {"prefix": meta.prefix},
                "storage": {"type": storage.type, "rootPath": str(Path(storage.root_path).absolute())},
            }
        }
        path = self._directory / "settings.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)
