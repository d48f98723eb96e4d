"""What clients cost the server of a log."""

from __future__ import annotations

from dataclasses import dataclass

from tidewal.adapters.rocksmq.owner.server import Server


@dataclass(frozen=True, slots=True)
class Usage:
    """What clients cost now: all of it zero when there are none, once their appends are committed."""

    connections: int
    receiving_bytes: int
    in_flight_bytes: int
    outbox_bytes: int
    waiting_requests: int


def usage(server: Server) -> Usage:
    """What clients cost now. From any thread."""
    connections = list(server._connections)
    return Usage(
        len(connections),
        server._memory.reserved,
        sum(connection.in_flight for connection in connections),
        sum(connection.outbox.size for connection in connections),
        sum(len(connection.tasks) for connection in connections),
    )
