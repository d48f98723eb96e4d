"""Open logs and make streams: `open_wal` finds a backend by URL, a `Factory` makes streams as configured."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from ..clock import HybridClock
from ..config.settings import Settings
from ..errors import ConfigError
from ..log.dead_letters import DeadLetters
from ..log.read_only import ReadOnlyWal
from ..log.redaction import shown_url, split_url
from ..log.wal import From, Wal
from ..metrics.metrics import Metrics
from .channel_reader import Grants
from .pursuit import Pursuit
from .stream import MsgStream
from .tt_stream import TtMsgStream

ENTRY_POINTS = "tidewal.wal"
PACK_BYTES = 4 * 1024 * 1024  # what one pack of `mq.mqBufSize` counts for in a stream's buffer

OpenWal = Callable[..., Awaitable[Wal]]


async def open_wal(url: str, *, read_only: bool = False, **options: object) -> Wal:
    """Open the log at `url` ("rocksmq:///path"). The adapter is the entry point of the group `tidewal.wal` named like
    the URL's scheme, up to a `+`; `options` are the adapter's. Raises `ConfigError` for a scheme that no installed
    adapter has and for an adapter whose packages are missing, and what the adapter raises.

    `read_only` opens a log that is there and changes nothing: no directory, topic or namespace is made, no ownership is
    taken over, now or later, and every call that writes raises `ReadOnly`. Where there is no log, or no process that
    owns its directory, this raises `Unavailable`. The adapter gets `read_only=True` as an option and
    ensures that opening and reading create nothing; writing calls do not reach it."""
    scheme = split_url(url).scheme.partition("+")[0]  # pulsar+ssl is pulsar
    known = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if scheme not in known:
        names = ", ".join(f"{name}://" for name in sorted(known))
        missing = f"{scheme}:// is not there yet" if scheme == "woodpecker" else f"no adapter for {shown_url(url)!r}"
        raise ConfigError(f"{missing}; known are {names}: set wal to one of these, or mq.type", key="wal")
    opening = _load(known[scheme])
    if read_only:
        return ReadOnlyWal(await opening(url, read_only=True, **options))
    return await opening(url, **options)


def _load(entry: EntryPoint) -> OpenWal:
    try:
        return cast(OpenWal, entry.load())
    except ImportError as error:
        distribution = entry.dist.name if entry.dist is not None else "tidewal"
        raise ConfigError(
            f"{entry.name}:// needs the package {error.name or error}, which is not installed: "
            f"pip install '{distribution}[{entry.name}]'",
            key="wal",
        ) from error


class Factory:
    """Makes plain and time-ticked streams over one log, all with the same buffers and dead letters."""

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
        pursuit = Pursuit(clock.clock, mq.pursuit_lag, mq.pursuit_buffer_size, mq.pursuit_buffer_time)
        self._pursuit = pursuit if mq.enable_pursuit_mode else None
        self._on_bad = dead_letters.bad if dead_letters is not None else None
        self._on_late = dead_letters.late if dead_letters is not None else None
        self._grants = grants

    def stream(self, group: str = "", *, reset_to: From | None = None) -> MsgStream:
        """A plain stream for `group`; `reset_to` as `MsgStream` says."""
        return MsgStream(
            self._wal,
            self._clock,
            group=group,
            buffer_bytes=self._buffer_bytes,
            on_bad=self._on_bad,
            reset_to=reset_to,
            resets=self._resets,
        )

    def tt_stream(
        self,
        group: str = "",
        *,
        vchannels: Iterable[str] | None = None,
        ordered: bool = True,
        reset_to: From | None = None,
        stalled_after_s: float | None = None,
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
        )
