"""The settings `rocksmq.*`."""

from __future__ import annotations

import os
from typing import Any, ClassVar
from urllib.parse import quote

from pydantic import Field, NonNegativeInt, PositiveInt

from ...runtime.config.section import RetainingSettings

MIB = 1024 * 1024


class RocksMqSettings(RetainingSettings):
    """The embedded log."""

    enabled_by: ClassVar[str] = "path"
    embedded: ClassVar[bool] = True
    ignored_keys: ClassVar[tuple[str, ...]] = (
        "lrucacheratio",
        "rocksmqPageSize",
        "compactionInterval",
        "timtickerInterval",
        "compressionTypes",
    )

    path: str = Field(
        default="tidewal-data/log", description="directory of the log; empty disables it (differs from Milvus)"
    )
    segment_size_in_mb: PositiveInt = Field(
        default=32, alias="segmentSizeInMB", description="size of a journal segment, MiB"
    )
    free_space_in_mb: NonNegativeInt = Field(
        default=64, alias="freeSpaceInMB", description="writes are refused below this much free space, MiB"
    )

    def url(self, directory: str = "") -> str:
        return f"rocksmq://{quote(os.path.abspath(directory or self.path))}" if self.path else ""

    def directory(self) -> str:
        return self.path

    def open_options(self) -> dict[str, Any]:
        return {"segment_bytes": self.segment_size_in_mb * MIB, "free_space_bytes": self.free_space_in_mb * MIB}
