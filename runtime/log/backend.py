"""What an adapter says about its kind of log: the object behind an entry point of the group `tidewal.wal`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import ConfigError
from .redaction import shown_url, split_url
from .wal import Capabilities, Wal

if TYPE_CHECKING:
    from ..config.section import BackendSettings
    from ..metrics.metric import Metric
    from .blocking_reader import BlockingReader


Status = Literal["ok", "missing", "optional"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check of `tidewal doctor`. `optional` is missing too, but needed only for what `advice`
    names."""

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `tidewal inspect` shows of a log beyond its channels: `content` under the key `title` of its JSON, `lines`
    under that heading on a terminal."""

    title: str
    content: dict[str, Any]
    lines: list[str]


class WalBackend:
    """A kind of log. An adapter derives a class from this one and registers one object of it: an entry point of the
    group `tidewal.wal`, with the same name as the backend. Nothing else in Tidewal names a backend.

    An adapter overrides what its log has, and leaves the rest. The module of the class must be light, for every process
    loads the backends of all installed adapters: methods import what they need, above all the log's client library.
    """

    name: str
    """The backend's name, as `Wal.name` and positions have it: lower-case letters and digits."""

    schemes: tuple[str, ...]
    """The schemes of the URLs it opens: `name`, perhaps others that begin with `name` and a `+`, such as `name+ssl`.
    Empty for a backend that is announced only: its settings are understood, and no log can be opened."""

    url_form: str
    """How such a URL is written, for errors and help: "name://HOST:PORT"."""

    needs_host: bool = False
    """Whether a URL names a log only with a host."""

    shared: bool = True
    """Whether other processes can open a log that is open in this one."""

    repeated_log_lines: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """What lines of its client libraries begin with, by the library's name, where they only repeat that the log cannot
    be reached: commands leave them out, since Tidewal's own error or warning says so once, with the address."""

    async def open(self, url: str, *, own: bool | None = None, read_only: bool = False, **options: Any) -> Wal:
        """Open the log at `url`, whose scheme is one of `schemes`.

        `own` says whether this process owns the log, where one process does: True requires it, False forbids it, None
        leaves it to the adapter. A log that any number of processes may open ignores it. `read_only` is described at
        `open_wal`: opening and reading create nothing; writing calls do not reach the adapter. `options` are the
        adapter's own. Raises `Unavailable`, `ConfigError`, and `ImportError` where a package is missing.
        """
        raise ConfigError(f"{self.name}:// is not there yet", key="wal")

    def capabilities(self) -> Capabilities:
        """What logs of this kind can do; unless overridden nothing beyond what each log can. Raises `ImportError` where
        a package is missing."""
        return Capabilities(
            atomic_batches=False, seek_by_time=False, truncate=False, multi_process_write=False, one_node=False
        )

    def settings(self) -> type[BackendSettings] | None:
        """The backend's section of the settings, whose keys begin with `name`; None without one. The module of the
        section must be light, too. With a section `mq.type` can name the backend, and `open` gets its `open_options`
        and an option `metrics` (a `Metrics` or None)."""
        return None

    def metrics(self) -> Sequence[Metric]:
        """The rows that the backend alone has in the table of metrics; their names begin with `name` and a `_`."""
        return ()

    def checks(self, path: Path) -> Iterable[Check]:
        """What `tidewal doctor` looks at for this backend; the future log would lie in `path`."""
        return ()

    async def abandoned(self, url: str) -> bool:
        """Whether no process has the log at `url` open, and only one that owns it can read it: then a tool owns it
        while it looks. Raises `ConfigError` where no log is there."""
        return False

    def inspect(self, url: str) -> Inspection | None:
        """What there is to say about the log at `url` beyond its channels; None for nothing. Called while the log is
        open."""
        return None

    def check_url(self, url: str) -> None:
        """Raise `ConfigError` for a URL that names no log, as far as that is seen without opening it."""
        if self.needs_host and not split_url(url).netloc:
            raise ConfigError(f"{shown_url(url)!r}: write {self.url_form}", key="wal")

    def absolute_url(self, url: str) -> str:
        """`url` for processes that run in another directory: with an absolute path where it has a relative one."""
        return url

    def reader(self, url: str) -> BlockingReader:
        """The log at `url` for a process without an event loop, which only reads: it connects at its first call. Such
        processes come and go, and load what they need anew: override this where the log can be read without its whole
        client. Raises `ConfigError` as `check_url`."""
        from .loop_thread import LoopReader

        self.check_url(url)
        return LoopReader(url)

    def advice(self, url: str) -> str:
        """What can be done where the log at `url` is `Unavailable` to a process that must not own it: a sentence
        without its full stop. Empty where only waiting helps."""
        return ""
