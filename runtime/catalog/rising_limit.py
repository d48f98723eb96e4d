"""How far an owner stamps of a limit that lies far ahead: no further than the time of its machine allows."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..clock import add_ms
from ..replicated.records import typed


class RisingLimit(NamedTuple):
    """An owner stamps and promises nothing above `limit` at the moment `since_ms` of the boot `boot` of its machine
    (`Clock.boot`, `monotonic_ms`), and nothing above a millisecond more in each millisecond after that. So another
    process on that machine knows how far it can have got, without a record that says so."""

    boot: str
    since_ms: int
    limit: int

    def at(self, boot: str, ms: int) -> int | None:
        """The limit at the moment `ms` of `boot`; None where no time is known between the two moments."""
        passed_ms = ms - self.since_ms
        return add_ms(self.limit, passed_ms) if boot and boot == self.boot and passed_ms >= 0 else None

    @classmethod
    def from_wire(cls, wire: Any) -> RisingLimit:
        """The limit of a wire form, which is the tuple itself. Raises `ValueError` for a malformed one."""
        boot, since_ms, limit = wire
        return cls(typed(boot, str), typed(since_ms, int), typed(limit, int))
