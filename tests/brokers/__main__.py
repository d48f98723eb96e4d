"""`python -m tests.brokers`: fetch or build what brokers need, and what starts them faster. Quick where all is there.

Where something is missing it says so in one line and succeeds: the tests that need brokers are skipped then.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from . import go_programs, jars
from .kafka import KafkaCluster
from .processes import BrokerFailed
from .pulsar import PulsarStandalone

ARCHIVED_WITHIN_S = 120.0  # the archive is written when the process ends


def prepare(kind: jars.Kind) -> None:
    """Resolve the jars, and archive the classes of one start; raises Missing, or BrokerFailed."""
    resolved = jars.resolve(kind)

    def archive(target: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            make = KafkaCluster if kind == "kafka" else PulsarStandalone
            with make(Path(scratch), archive=target) as broker:
                broker.stop(ARCHIVED_WITHIN_S)

    resolved.make(resolved.archive.name, archive)


def main() -> None:
    for kind in ("kafka", "pulsar"):
        try:
            prepare(kind)
        except (jars.Missing, BrokerFailed) as error:
            print(f"no {kind} for tests: {error}", file=sys.stderr)
    for program in go_programs.FOR_TESTS:
        try:
            go_programs.build_program(program)
        except jars.Missing as error:
            print(f"no {program} for tests: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
