"""The settings `objects.*`."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveFloat, PositiveInt

from ...runtime.config.section import BackendSettings

BUCKET_LINGER_MS = 150.0  # 576,000 blocks a day at most that are not full: three dollars
DIRECTORY_LINGER_MS = 1.0
CREATE_DOLLARS = 5e-6  # of one request that creates an object, in S3 in us-east-1
DAY_S = 24 * 3600


class ObjectsSettings(BackendSettings):
    """The log on object storage."""

    enabled_by: ClassVar[str] = "address"
    linked: ClassVar[bool] = True

    address: str = Field(default="", description="s3://bucket/prefix or one of its kind; empty disables it")
    listen: str = Field(
        default="",
        description="host:port where this process, while it owns the log, takes links of others that write; port 0 one "
        "that is free; empty: objects.advertise, and where that is empty, too, none",
    )
    advertise: str = Field(
        default="", description="host:port where they reach it; empty: objects.listen; port 0 the one there"
    )
    lease_s: PositiveFloat = Field(
        default=15.0, description="how long a log must be silent before another process claims it, s"
    )
    linger_ms: float = Field(
        default=-1.0,
        description="at most one block that is not full in this time, ms; negative: 150 in a bucket, 1 in a directory",
    )
    block_bytes: PositiveInt = Field(default=2 * 1024 * 1024, description="a block is full at this size, bytes")
    pending_bytes: PositiveInt = Field(default=64 * 1024 * 1024, description="what may wait for the store, bytes")
    cache_bytes: PositiveInt = Field(default=64 * 1024 * 1024, description="blocks kept in memory for readers, bytes")
    delivery_timeout_s: PositiveFloat = Field(
        default=30.0, description="when an append that the store has not taken has an unknown outcome, s"
    )
    poll_s: PositiveFloat = Field(
        default=1.0, description="how often a process that does not own the log looks for new blocks, at least, s"
    )

    hedge_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="blocks that are sent once more, since the store has not answered in the time that 99 of 100 took, "
        "at most as a share of all; 0: none, as in a directory",
    )
    max_dollars_per_day: float = Field(
        default=0.0,
        ge=0,
        description="blocks, full ones too, wait so that creating them costs no more, by the prices of S3; 0: no limit",
    )

    @property
    def linger_s(self) -> float:
        """`linger_ms` in seconds."""
        return (BUCKET_LINGER_MS if self.linger_ms < 0 else self.linger_ms) / 1000

    @property
    def least_interval_s(self) -> float:
        """How long a block waits behind the one before, also when it is full, in seconds."""
        if not self.max_dollars_per_day:
            return 0.0
        return DAY_S * CREATE_DOLLARS * (1 + self.hedge_share) / self.max_dollars_per_day

    @property
    def mark_s(self) -> float:
        """How often an idle owner puts a block, in seconds."""
        return self.lease_s * 2 / 3

    def url(self, directory: str = "") -> str:
        return self.address
