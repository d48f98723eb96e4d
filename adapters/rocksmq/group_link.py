"""The link of group members whose log is owned by another process: `group_service.py` says what goes over it."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, cast

from ...runtime.groups.link import Ack, Share, Shares
from ...runtime.payloads import owned
from ...runtime.wal import Append, From, GroupInfo
from .channels import ids_of_runs, runs_of_ids

BEATS_PER_TIMEOUT = 3  # so that two may come late


class Ask(Protocol):
    """`Link.ask`."""

    def __call__(self, method: str, *arguments: object, wait_s: float = 0.0) -> Awaitable[Any]: ...


class Notify(Protocol):
    """`Link.notify`. Called from any thread."""

    def __call__(self, method: str, *arguments: object) -> None: ...


class RemoteLink:
    """`GroupLink` over one link to the owner, and the groups' own management. `close` it with the link."""

    def __init__(self, ask: Ask, notify: Notify) -> None:
        self._ask = ask
        self._heart = Heart(notify)

    def close(self) -> None:
        """Keep no session alive any more. A second call does nothing."""
        self._heart.stop()

    async def join(
        self, group: str, member: str, channels: Sequence[str], start: From, session_timeout_s: float
    ) -> None:
        self._heart.add(group, member, session_timeout_s)  # first: the loop may be busy when the answer comes
        try:
            await self._ask("group.join", group, member, list(channels), start.value, float(session_timeout_s))
        except BaseException:
            self._heart.remove(group, member)
            raise

    async def shares(self, group: str, member: str, seen: int | None, wait_s: float) -> Shares:
        version, held, wanted_back = await self._ask("group.shares", group, member, seen, wait_s, wait_s=wait_s)
        shares = {
            channel: Share(lease, acked_to, frozenset(ids_of_runs(runs)))
            for channel, (lease, acked_to, runs) in cast("dict[str, Any]", held).items()
        }
        return Shares(version, shares, frozenset(wanted_back))

    async def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        pictures = [[ack.channel, ack.lease, ack.upto, runs_of_ids(ack.ids)] for ack in acks]
        if not all(type(output.payload) is bytes for output in outputs):  # they are sent from where they are
            outputs = [output._replace(payload=owned(output.payload)) for output in outputs]
        return await self._ask("group.commit", group, member, pictures, list(outputs))

    async def release(self, group: str, member: str, channel: str, lease: int) -> None:
        await self._ask("group.release", group, member, channel, lease)

    async def seek(self, group: str, member: str, channel: str, lease: int, upto: bytes) -> None:
        await self._ask("group.seek", group, member, channel, lease, upto)

    async def leave(self, group: str, member: str) -> None:
        self._heart.remove(group, member)
        await self._ask("group.leave", group, member)

    async def groups(self) -> list[GroupInfo]:
        """`Wal.groups`."""
        return [
            GroupInfo(name, positions, {member: frozenset(held) for member, held in members.items()})
            for name, positions, members in await self._ask("group.list")
        ]

    async def seek_group(self, group: str, channel: str, upto: bytes) -> None:
        """`Wal.seek_group`, to the position `upto`."""
        await self._ask("group.move", group, channel, upto)

    async def drop_group(self, group: str) -> None:
        """`Wal.drop_group`."""
        await self._ask("group.drop", group)


class Heart:
    """A thread that says for each member that it lives, however busy the event loop is. It is there while there are
    members. Thread-safe."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._timeouts_s: dict[tuple[str, str], float] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, group: str, member: str, session_timeout_s: float) -> None:
        """Begin to beat for a member."""
        with self._changed:
            self._timeouts_s[group, member] = session_timeout_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tidewal-heart", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, group: str, member: str) -> None:
        """Beat no more for a member; unknown is fine."""
        with self._changed:
            self._timeouts_s.pop((group, member), None)
            self._changed.notify()

    def stop(self) -> None:
        """Beat no more for anybody."""
        with self._changed:
            self._timeouts_s.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._timeouts_s:
                    self._changed.wait(min(self._timeouts_s.values()) / BEATS_PER_TIMEOUT)
                members = list(self._timeouts_s)
                if not members:
                    self._thread = None
                    return
            try:
                for group, member in members:
                    self._notify("beat", group, member)
            except RuntimeError:  # the link's loop is closed, and with it went the members
                self.stop()
