"""Run a command, and kill it when standard input ends: then whoever started both is gone, however it ended.

Prints the command's process id and exits with its status (128 + signal where a signal ended it). What the command
prints goes to standard error. Needs nothing but the standard library, so that it starts in no time.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


def die_with_the_guard() -> None:
    """For Linux: even a guard that is killed itself leaves nothing behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def kill_at_the_end_of_input(child: subprocess.Popen) -> None:
    while os.read(0, 1):
        pass
    child.kill()


def main() -> int:
    child = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        preexec_fn=die_with_the_guard,  # no thread has been started yet
    )
    print(child.pid, flush=True)
    threading.Thread(target=kill_at_the_end_of_input, args=(child,), daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
