"""Make streams as configured: with the same buffers and the same dead letters for all."""

from __future__ import annotations

from collections.abc import Iterable

from ..arguments import checked
from ..clock import HybridClock
from ..config.settings import Settings
from ..log.dead_letters import DeadLetters
from ..log.wal import From, Wal
from ..metrics.metrics import Metrics
from .channel_reader import Grants
from .pursuit import pursuit_of
from .stream import MsgStream
from .tt_stream import TtMsgStream

PACK_BYTES = 4 * 1024 * 1024  # what one pack of `mq.mqBufSize` counts for in a stream's buffer


class Factory:
    """Makes plain and time-ticked streams over one log, all with the same buffers and dead letters."""

    @checked
    def __init__(
        self,
        wal: Wal,
        clock: HybridClock,
        settings: Settings | None = None,
        *,
        dead_letters: DeadLetters | None = None,
        grants: Grants | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """`mq.mqBufSize` of `settings` bounds each stream's buffer, at `PACK_BYTES` a pack; `mq.enablePursuitMode` and
        the keys beside it say how time-ticked streams that are far behind join packs. `grants` are those of a node's
        catalog, for its time-ticked streams. Bad and late records go to `dead_letters`."""
        mq = (settings or Settings()).mq
        self._wal = wal
        self._clock = clock
        self._buffer_bytes = mq.mq_buf_size * PACK_BYTES
        self._resets = None if metrics is None else metrics.counter("wal_scan_reset_total")
        self._pursuit = pursuit_of(mq, clock)
        self._on_bad = dead_letters.bad if dead_letters is not None else None
        self._on_late = dead_letters.late if dead_letters is not None else None
        self._grants = grants

    @checked
    def stream(self, group: str = "", *, reset_to: From | None = None, where: str | None = None) -> MsgStream:
        """A plain stream for `group`; `reset_to` and `where` as `MsgStream` says."""
        return MsgStream(
            self._wal,
            self._clock,
            group=group,
            buffer_bytes=self._buffer_bytes,
            on_bad=self._on_bad,
            reset_to=reset_to,
            resets=self._resets,
            where=where,
        )

    @checked
    def tt_stream(
        self,
        group: str = "",
        *,
        vchannels: Iterable[str] | None = None,
        ordered: bool = True,
        reset_to: From | None = None,
        stalled_after_s: float | None = None,
        where: str | None = None,
    ) -> TtMsgStream:
        """A time-ticked stream for `group`; the parameters are those of `TtMsgStream`."""
        return TtMsgStream(
            self._wal,
            group=group,
            vchannels=vchannels,
            buffer_bytes=self._buffer_bytes,
            ordered=ordered,
            on_bad=self._on_bad,
            on_late=self._on_late,
            grants=self._grants,
            reset_to=reset_to,
            resets=self._resets,
            stalled_after_s=stalled_after_s,
            pursuit=self._pursuit,
            where=where,
        )
