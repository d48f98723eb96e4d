"""The name of a node that was given none."""

from __future__ import annotations

import os
import socket


def node_name() -> str:
    """The default name of a node: the host and the process id."""
    return f"{socket.gethostname()}-{os.getpid()}"
