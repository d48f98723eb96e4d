"""Turn a start in a channel into a group's position: the id up to which all is done."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import cast

from ..errors import Closed, PositionLost
from ..log.wal import ChannelInfo, Entry, From, FromId, FromTime, Start, Wal

FIRST_TIME = 1  # the lowest timestamp: entries without a time have 0


async def resolve(wal: Wal, channel: str, start: Start) -> bytes:
    """The position from which reading goes on at `start`; b"" for the first entry there is, or will be. For backends
    whose ids are numbers of one length. Raises `ChannelNotFound`, and `PositionLost` where an id was removed
    or never given out."""
    info = await wal.describe(channel)
    latest = info.latest_id or b""
    match start:
        case From.EARLIEST:
            return b""
        case From.LATEST:
            return latest
        case FromTime(timestamp):
            first = await wal.id_at(channel, FIRST_TIME)
            if first is None:  # no entry has a time
                return b""
            id = await wal.id_at(channel, timestamp)
            if id == first:  # nothing before it has a time, so nothing says that it lies before the time asked for
                return b""
            return latest if id is None else just_before(id)
        case FromId(id, inclusive):
            position = just_before(id) if inclusive else id
            behind_all = id > latest
            before_first = position < (latest if info.first_id is None else just_before(info.first_id))
            if behind_all or (before_first and await _something_is_missing(wal, info, start)):
                raise PositionLost(
                    f"position {id.hex()} is not in channel {channel}",
                    requested=id,
                    first_available=info.first_id,
                    channel=channel,
                )
            return position


async def _something_is_missing(wal: Wal, info: ChannelInfo, start: FromId) -> bool:
    """Whether an entry between `start` and the first that is kept was removed. Ids need not be dense, so the log is
    asked for the next entry. Raises `PositionLost` where the log knows that one was removed."""
    if info.first_id is None:
        return True
    reader = cast("AsyncGenerator[Sequence[Entry]]", wal.read(info.name, start))
    try:
        return (await anext(reader))[0].id < info.first_id
    except StopAsyncIteration:
        raise Closed("the log is closed") from None
    finally:
        await reader.aclose()


def just_before(id: bytes) -> bytes:
    """The position from which reading goes on with `id`."""
    number = int.from_bytes(id, "big")
    return (number - 1).to_bytes(len(id), "big") if number else b""
