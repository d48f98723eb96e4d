"""The settings `sqlite.*`, in a file of settings or in the environment."""

from __future__ import annotations

import os
from typing import ClassVar
from urllib.parse import quote

from pydantic import Field, PositiveFloat

from tidewal.adapters import BackendSettings


class SqliteSettings(BackendSettings):
    """The log in a SQLite file."""

    enabled_by: ClassVar[str] = "path"

    path: str = Field(default="", description="file of the log; empty disables it")
    busy_timeout_s: PositiveFloat = Field(default=10.0, description="how long a call waits for other processes, s")
    poll_s: PositiveFloat = Field(default=0.05, description="how often readers look for appends of other processes, s")

    def url(self, directory: str = "") -> str:
        return f"sqlite://{quote(os.path.abspath(self.path))}" if self.path else ""
