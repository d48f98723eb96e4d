"""The log of the demo: one of its own, in its directory, or on the brokers or in the bucket that a URL names."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from urllib.parse import quote, urlunsplit

from tidewal import errors, open_wal
from tidewal.runtime import shown_url, split_url

NAME = "tidewal-demo"
LASTING = ("rocksmq", "kafka", "pulsar", "s3", "gs", "az", "file")


def place_of(directory: Path, wal: str) -> tuple[str, bool]:
    """The URL of the log for the demo in `directory`, and whether it is the demo's own on the brokers or in the bucket.

    Without `wal` it is a RocksMQ in the directory. A URL of brokers or a bucket that names no prefix or namespace
    gets one made from the directory, so that --keep finds it again and another directory begins anew. Raises
    `ConfigError` for a log that Spark and a second process cannot read.
    """
    if not wal:
        return f"rocksmq://{quote(str(directory.absolute() / 'log'))}", False
    parts = split_url(wal)
    scheme = parts.scheme.partition("+")[0]
    if scheme not in LASTING:
        known = ", ".join(f"{name}://" for name in LASTING)
        raise errors.ConfigError(f"the demo runs on {known}, not on {shown_url(wal)!r}", key="wal")
    if scheme == "rocksmq" or parts.path.strip("/"):
        return wal, False
    name = f"{NAME}-{hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:12]}"
    path = f"/public/{name}" if scheme == "pulsar" else f"/{name}"
    return urlunsplit(parts._replace(path=path)), True


async def clear(url: str) -> None:
    """Drop all channels of the log."""
    wal = await open_wal(url)
    try:
        await asyncio.gather(*[wal.drop_channel(channel) for channel in await wal.channels()])
    finally:
        await wal.close()
