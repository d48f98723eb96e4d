"""What a log without consumer groups answers to those who ask for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn

from ..errors import Unsupported
from ..wal import From, GroupInfo, GroupMember, Start


class WithoutGroups(ABC):
    """The part of a `Wal` that concerns groups, for a backend whose `capabilities` say that it has none: everything
    raises `Unsupported`, and `Closed` once the log is closed."""

    name: str

    async def join(
        self,
        group: str,
        channels: Sequence[str],
        *,
        start: From = From.EARLIEST,
        reset_to: From | None = None,
        session_timeout_s: float = 30.0,
    ) -> GroupMember:
        self._no_groups()

    async def groups(self) -> list[GroupInfo]:
        self._no_groups()

    async def seek_group(self, group: str, channel: str, start: Start) -> None:
        self._no_groups()

    async def drop_group(self, group: str) -> None:
        self._no_groups()

    def _no_groups(self) -> NoReturn:
        self._check_open()
        raise Unsupported(
            f"{self.name}:// has no consumer groups; read channels with positions of your own", capability="groups"
        )

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `Closed` once the log is closed."""
