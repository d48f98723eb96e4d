"""What the brokers of the tests are started with: limits and settings, by backend.

`compose/` starts brokers with the same; `tests/brokers/test_compose.py` compares them. The tests' own
brokers listen on ports that are chosen anew for each start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

MIB = 1024 * 1024
MESSAGE_BYTES = 5 * MIB  # what a user may send in one message

# Brokers count more than the payload: a batch's header on Kafka, metadata on Pulsar. So their limits lie above ours.
BROKER_MESSAGE_BYTES = MESSAGE_BYTES + 64 * 1024
PULSAR_FRAME_BYTES = BROKER_MESSAGE_BYTES + 64 * 1024  # without it a message over 5 MiB hangs in the bookie

# Where those of compose/ listen.
KAFKA_PORT = 9092
PULSAR_PORT = 6650
PULSAR_WEB_PORT = 8080

KAFKA_SETTINGS = {
    "process.roles": "broker,controller",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "message.max.bytes": str(BROKER_MESSAGE_BYTES),
    "replica.fetch.max.bytes": str(BROKER_MESSAGE_BYTES),
    "group.initial.rebalance.delay.ms": "0",
}

# Quick to notice a dead node, and small: several nodes share a machine with the tests.
KAFKA_TEST_SETTINGS = {
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "group.min.session.timeout.ms": "1000",
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "controller.quorum.election.timeout.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    "log.cleaner.dedupe.buffer.size": "4194304",
    "log.index.size.max.bytes": "1048576",
}

PULSAR_SETTINGS = {
    "clusterName": "standalone",
    "allowLoopback": "true",
    "managedLedgerDefaultEnsembleSize": "1",
    "managedLedgerDefaultWriteQuorum": "1",
    "managedLedgerDefaultAckQuorum": "1",
    "maxMessageSize": str(BROKER_MESSAGE_BYTES),
    "nettyMaxFrameSizeBytes": str(PULSAR_FRAME_BYTES),
    "brokerDeleteInactiveTopicsEnabled": "false",
    "brokerDeduplicationEnabled": "true",
    "managedLedgerNewEntriesCheckDelayInMillis": "0",  # the default shows a waiting reader each message 10 ms late
}

# Without fsync what was acknowledged survives kill -9, but no power loss.
PULSAR_TEST_SETTINGS = {
    "journalSyncData": "false",
    "journalMaxGroupWaitMSec": "0",
    "journalFlushWhenQueueEmpty": "true",
    "diskUsageThreshold": "0.99",  # at 0.95 the bookie takes no entries, which on a large disk is at many GiB free
}

JAVA_OPTIONS = (
    "-Xms128m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "-Djava.net.preferIPv4Stack=true",
)

PULSAR_JAVA_OPTIONS = (
    *JAVA_OPTIONS,
    "-XX:MaxDirectMemorySize=512m",
    "-Dio.netty.tryReflectionSetAccessible=true",
    *(
        f"--add-opens={package}=ALL-UNNAMED"
        for package in (
            "java.base/java.nio",
            "java.base/jdk.internal.misc",
            "java.base/sun.net",
            "java.base/java.util.zip",
            "java.base/java.lang",
            "java.base/jdk.internal.platform",
            "java.management/sun.management",
            "jdk.management/com.sun.management.internal",
        )
    ),
)


def temporary_files(folder: Path) -> str:
    """The option of Java by which a broker unpacks its native libraries there: one that is killed leaves them."""
    return f"-Djava.io.tmpdir={folder}"


def kafka_replication(nodes: int) -> dict[str, str]:
    """Settings for so many nodes: three copies where there are three, and a write needs all but one of them."""
    copies = min(nodes, 3)
    in_sync = max(copies - 1, 1)
    return {
        "default.replication.factor": str(copies),
        "min.insync.replicas": str(in_sync),
        "offsets.topic.replication.factor": str(copies),
        "transaction.state.log.replication.factor": str(copies),
        "transaction.state.log.min.isr": str(in_sync),
        "share.coordinator.state.topic.replication.factor": str(copies),
        "share.coordinator.state.topic.min.isr": str(in_sync),
    }


def properties(*settings: Mapping[str, str]) -> str:
    """Write settings as Java's properties file; later ones win."""
    merged = {key: value for each in settings for key, value in each.items()}
    return "".join(f"{key}={value}\n" for key, value in merged.items())


def parse_properties(lines: Iterable[str]) -> dict[str, str]:
    """Read such a file."""
    entries = (line.strip() for line in lines)
    return dict(entry.split("=", 1) for entry in entries if entry and not entry.startswith("#"))
