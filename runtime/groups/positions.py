"""Turn a place in a channel into a group's position: the id up to which all is done."""

from __future__ import annotations

from ..errors import PositionLost
from ..wal import From, FromId, FromTime, Start, Wal


async def resolve(wal: Wal, channel: str, start: Start) -> bytes:
    """The position from which reading goes on at `start`; b"" for the first entry that there is, or will be. For
    backends whose ids are dense numbers of one length. Raises `ChannelNotFound`, and `PositionLost` where an id was
    removed or never given out."""
    info = await wal.describe(channel)
    latest = info.latest_id or b""
    match start:
        case From.EARLIEST:
            return b""
        case From.LATEST:
            return latest
        case FromTime(timestamp):
            id = await wal.id_at(channel, timestamp)
            return latest if id is None else just_before(id)
        case FromId(id, inclusive):
            position = just_before(id) if inclusive else id
            least = latest if info.first_id is None else just_before(info.first_id)
            if position < least or id > latest:
                raise PositionLost(
                    f"position {id.hex()} is not in channel {channel}",
                    requested=id,
                    first_available=info.first_id,
                )
            return position


def just_before(id: bytes) -> bytes:
    """The position from which reading goes on with `id`."""
    number = int.from_bytes(id, "big")
    return (number - 1).to_bytes(len(id), "big") if number else b""
