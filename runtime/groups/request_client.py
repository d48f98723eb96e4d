"""The coordinator client of group members whose log another process owns: the requests of `request_service.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

from ..actor.heartbeat import HeartbeatCallback, HeartbeatThread
from ..log.payloads import owned
from ..log.wal import Append, From, GroupInfo
from .coordinator_client import Ack, AssignedChannel, MemberAssignment

BEATS_PER_TIMEOUT = 3  # so that two may come late


class RequestConnection(Protocol):
    """A connection to the owner of a log."""

    async def ask(self, method: str, *arguments: object, wait_s: float = 0.0) -> Any:
        """The owner's answer to a request, for which it may wait `wait_s` seconds. Raises what the owner raises, and
        `Unavailable`."""
        ...

    def notify(self, method: str, *arguments: object) -> None:
        """Send a request without an answer, from any thread."""
        ...


class RequestCoordinatorClient(ABC):
    """`CoordinatorClient` over one connection to the owner. `close` it with the connection. A log derives a class that
    has its ids in requests."""

    def __init__(self, connection: RequestConnection, heartbeat: SessionHeartbeat | None = None) -> None:
        """`heartbeat` is that of the connections before this one, where there were any."""
        self._ask = connection.ask
        self._heartbeat = heartbeat or SessionHeartbeat(connection.notify)

    def close(self) -> None:
        """Keep no session alive any more. A second call does nothing."""
        self._heartbeat.stop()

    @abstractmethod
    def encode_ids(self, ids: Iterable[bytes]) -> Sequence[object]:
        """Single ids as requests have them."""

    @abstractmethod
    def decode_ids(self, wire: Sequence[Any]) -> Iterable[bytes]:
        """Single ids of an answer."""

    async def join(
        self, group: str, member: str, channels: Sequence[str], start: From, session_timeout_s: float
    ) -> None:
        before_s = self._heartbeat.timeout_s(group, member)
        self._heartbeat.add(group, member, session_timeout_s)  # first: the loop may be busy when the answer comes
        try:
            await self._ask("group.join", group, member, list(channels), start.value, float(session_timeout_s))
        except BaseException:
            if before_s is None:
                self._heartbeat.remove(group, member)
            else:  # a join that is refused ends no membership
                self._heartbeat.add(group, member, before_s)
            raise

    async def assignment(self, group: str, member: str, seen: int | None, wait_s: float) -> MemberAssignment:
        version, held, revoking = await self._ask("group.shares", group, member, seen, wait_s, wait_s=wait_s)
        channels = {
            channel: AssignedChannel(epoch, acked_to, frozenset(self.decode_ids(ids)), metadata)
            for channel, (epoch, acked_to, ids, metadata) in cast("dict[str, Any]", held).items()
        }
        return MemberAssignment(version, channels, frozenset(revoking))

    async def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        encoded = [
            [ack.channel, ack.assignment_epoch, ack.upto, self.encode_ids(ack.ids), ack.metadata] for ack in acks
        ]
        if not all(type(output.payload) is bytes for output in outputs):  # payloads are sent without a copy
            outputs = [output._replace(payload=owned(output.payload)) for output in outputs]
        return await self._ask("group.commit", group, member, encoded, list(outputs))

    async def release(self, group: str, member: str, channel: str, assignment_epoch: int) -> None:
        await self._ask("group.release", group, member, channel, assignment_epoch)

    async def seek(self, group: str, member: str, channel: str, assignment_epoch: int, upto: bytes) -> None:
        await self._ask("group.seek", group, member, channel, assignment_epoch, upto)

    async def leave(self, group: str, member: str) -> None:
        self._heartbeat.remove(group, member)
        await self._ask("group.leave", group, member)

    async def groups(self) -> list[GroupInfo]:
        return [
            GroupInfo(name, positions, {member: frozenset(held) for member, held in members.items()}, metadata)
            for name, positions, members, metadata in await self._ask("group.list")
        ]

    async def seek_group(self, group: str, channel: str, upto: bytes) -> None:
        await self._ask("group.move", group, channel, upto)

    async def drop_group(self, group: str) -> None:
        await self._ask("group.drop", group)


class SessionHeartbeat:
    """Sends the heartbeats of each member's session on a thread, however busy the event loop is."""

    def __init__(self, notify: Callable[[str, str, str], None]) -> None:
        """`notify` is that of the connection, called from any thread."""
        self._notify = notify
        self._timeouts_s: dict[tuple[str, str], float] = {}
        self._heartbeat = HeartbeatThread()
        self._beating: HeartbeatCallback | None = None
        self._heartbeat.start()

    def add(self, group: str, member: str, session_timeout_s: float) -> None:
        """Send heartbeats for a member from now on, `BEATS_PER_TIMEOUT` in each session timeout (seconds)."""
        self._timeouts_s[group, member] = session_timeout_s
        if self._beating is None:
            self._beating = self._heartbeat.every(self._interval_s, self._beat, "of group members")
        else:
            self._beating.within(self._interval_s())

    def timeout_s(self, group: str, member: str) -> float | None:
        """The session timeout of a member, in seconds; None for one without heartbeats."""
        return self._timeouts_s.get((group, member))

    def remove(self, group: str, member: str) -> None:
        """Send no more heartbeats for a member; an unknown member is fine."""
        self._timeouts_s.pop((group, member), None)
        if not self._timeouts_s:
            self.stop()

    def stop(self) -> None:
        """Send no more heartbeats."""
        self._timeouts_s.clear()
        beating, self._beating = self._beating, None
        if beating is not None:
            beating.cancel()

    def _interval_s(self) -> float:
        return min(list(self._timeouts_s.values()), default=1.0) / BEATS_PER_TIMEOUT

    def _beat(self) -> None:
        try:
            for group, member in list(self._timeouts_s):
                self._notify("beat", group, member)
        except RuntimeError:  # the connection's loop is closed, and its members are gone
            self.stop()
