"""Logs on real brokers, each beside the bare client of its broker on the same topic, in rounds that take turns.

    python -m benchmarks.brokers [--messages 50000] [--rounds 5] [--only pulsar]

Messages have 1 KiB. Needs what the tests on brokers need (see `make setup`); client and broker share the machine.
"""

from __future__ import annotations

import argparse

from benchmarks.brokers import kafka, pulsar


def main() -> None:
    parser = argparse.ArgumentParser(description="Logs on real brokers beside the bare clients")
    parser.add_argument("--messages", type=int, default=50_000, help="messages of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["kafka", "pulsar"])
    arguments = parser.parse_args()
    for name, benchmark in {"kafka": kafka, "pulsar": pulsar}.items():
        if arguments.only in (None, name):
            benchmark.main(arguments.messages, arguments.rounds)


if __name__ == "__main__":
    main()
