"""RocksMQ as a backend: what is known of it before RocksDB is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ...runtime.errors import ConfigError, Unavailable
from ...runtime.log.backend import Check, Inspection, WalBackend
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.redaction import shown_url, split_url
from ...runtime.log.start_command import start_command
from ...runtime.log.wal import Capabilities, Wal
from .address import Address
from .log_directory import local_directory

if TYPE_CHECKING:
    from ...runtime.metrics.metric import Metric
    from .settings import RocksMqSettings

FAILOVER_S = 30.0  # how long calls wait for another owner
OPENING_S = 10.0  # how long a process that must not own the directory waits, where no process does, to open it
TAKEOVER_S = 0.5  # in which one of the processes that share a directory owns it once its owner has ended


class RocksMQBackend(WalBackend):
    """A log in a directory, owned by one process and shared by all of its machine."""

    name = "rocksmq"
    schemes: tuple[str, ...] = ("rocksmq",)
    url_form = "rocksmq:///absolute/path"

    async def open(
        self,
        url: str,
        *,
        own: bool | None = None,
        read_only: bool = False,
        in_use_only: bool = True,
        failover_s: float = FAILOVER_S,
        **options: Any,
    ) -> Wal:
        """Open `rocksmq:///absolute/path`, `rocksmq://./relative/path`, or `rocksmq://127.0.0.1:PORT?token_file=/path`.

        The first process to open a directory owns it, with `options` of `RocksMQ.open`. Other processes do all that the
        owner does, through it, and one of them takes the directory over when the owner ends. `own` True: this process
        requires ownership until it closes the log. An owner that does not require it yields the directory and goes on
        as the other processes do; where that takes longer than `failover_s`, or another process requires ownership
        already, `DirectoryInUse` is raised. `own` False, or a port: never own the directory; opening waits 10 s at most
        where no process does. `failover_s` (seconds) is also how long calls wait for an owner before they raise
        `Unavailable`; with 0 this opening tries once. With `in_use_only` False calls go on with another owner also
        where the log is being migrated, or was: the caller looks at that itself.
        `read_only` is `own` False, and raises `Unavailable` at once where no process owns the directory, unless `own`
        is given; with `own` True it raises `ConfigError`.

        Returns a `RocksMQ` with `own` True, else a `SharedRocksMQ`.
        """
        from .client.shared import SharedRocksMQ
        from .owner.handover import force_own

        address = Address.parse(url)
        if own and read_only:
            raise ConfigError("own=True and read_only=True contradict each other: a reader owns nothing", key="wal")
        if own:
            if not address.directory:
                raise ConfigError(
                    f"{shown_url(url)!r}: a directory is owned by its path, not through a port", key="wal"
                )
            return await force_own(address, failover_s, options)
        unowned_s = OPENING_S if own is False else TAKEOVER_S if read_only else None
        return await SharedRocksMQ.connect(
            address,
            takeover=own is None and not read_only,
            unowned_s=unowned_s,
            failover_s=failover_s,
            in_use_only=in_use_only and not read_only,
            **options,
        )

    def settings(self) -> type[RocksMqSettings]:
        from .settings import RocksMqSettings

        return RocksMqSettings

    def metrics(self) -> Sequence[Metric]:
        from .metric_rows import METRICS

        return METRICS

    def capabilities(self) -> Capabilities:
        from .owner.store import CAPABILITIES

        return CAPABILITIES

    def checks(self, path: Path) -> Iterable[Check]:
        from .machine_checks import free_disk, unix_sockets

        return free_disk(path), unix_sockets()

    async def abandoned(self, url: str) -> bool:
        if not Address.parse(url).directory:
            return False  # a port names a process that has it open
        local_directory(url)
        try:
            wal = await self.open(url, own=False, failover_s=0)
        except Unavailable:
            return True
        await wal.close()
        return False

    def inspect(self, url: str) -> Inspection | None:
        """The size of the journal, and what salvages could not save."""
        from .check.loss_report import journal_summary, loss_lines

        if not (directory := Address.parse(url).directory):
            return None
        content = journal_summary(directory)
        size = f"{content['segments']} segments, {content['bytes']:,} bytes"
        return Inspection("journal", content, [size, *loss_lines(content["losses"])])

    def check_url(self, url: str) -> None:
        Address.parse(url)

    def absolute_url(self, url: str) -> str:
        parts = split_url(url)
        if parts.netloc not in (".", ".."):
            return url
        return f"{self.name}://{quote(Address.parse(url).directory)}"

    def reader(self, url: str) -> BlockingReader:
        """Reads over the owner's socket, without RocksDB and without a loop."""
        from .client.blocking_client import BlockingClient

        return BlockingClient(Address.parse(url), advice=self.advice(url))

    def advice(self, url: str) -> str:
        directory = Address.parse(url).directory
        command = start_command(f"{self.name}://{quote(directory)}") if directory else "tidewal run --wal its URL"
        return f"A RocksMQ is read and written through the process that has it open: start one ({command})"


BACKEND = RocksMQBackend()
