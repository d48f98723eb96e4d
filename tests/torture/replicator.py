"""`tidewal replicate`, from the log of a run into a replica: python -m tests.torture.replicator URL REPLICA"""

from __future__ import annotations

import os
import signal
import sys
import threading

from tidewal.cli.main import main


def _follow() -> None:
    for line in sys.stdin:
        if line.strip() == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_follow, daemon=True).start()
    source, replica = sys.argv[1:]
    main(["replicate", "--from", source, "--to", replica])
