"""What a machine needs for a RocksMQ: `tidewal doctor` looks for it."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path

from ...runtime.log.backend import Check

MINIMAL_FREE_BYTES = 512 * 1024 * 1024  # a fresh log with its spare segments, and room to write


def free_disk(path: Path) -> Check:
    """Look for room where a log in `path` would lie."""
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    free_bytes = shutil.disk_usage(existing).free
    found = f"{free_bytes / 2**30:.1f} GiB in {existing}"
    if free_bytes >= MINIMAL_FREE_BYTES:
        return Check("free disk", "ok", found)
    return Check("free disk", "missing", found, f"free {MINIMAL_FREE_BYTES >> 20} MiB, or set rocksmq.path elsewhere")


def unix_sockets() -> Check:
    """Bind a socket as a log does: the owner of a RocksMQ directory serves other processes through it."""
    name = "Unix sockets"
    if not hasattr(socket, "AF_UNIX"):
        return Check(name, "missing", "not on this platform", "run on Linux or macOS")
    try:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(Path(folder) / "probe.sock"))
    except OSError as error:
        return Check(name, "missing", str(error), "set TMPDIR to a short path on a local disk")
    return Check(name, "ok", "can be bound")
