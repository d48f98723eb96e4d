"""`tidewal run`: a node until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote, urlsplit

import typer

from ..runtime.cluster.roles import ROLE_NAMES
from ..runtime.errors import InvalidRequest, PositionMismatch
from .addresses import print_addresses
from .child_process import end_with_parent
from .logging_setup import LogFormat, LogFormatOption, LogLevel, LogLevelOption, configure, failures_as_lines
from .setting_options import ConfigFile, Listen, MetricsPort, NodeAddress, TablesOption, WalOption, setting_arguments

if TYPE_CHECKING:
    from ..runtime.config.settings import Settings

_log = logging.getLogger("tidewal.cli")

DEFAULT_DATA = Path("tidewal-data")


def run(
    data: Annotated[
        Path | None, typer.Option(help=f"Directory of log/ and tables/; {DEFAULT_DATA} by default.")
    ] = None,
    config: ConfigFile = None,
    wal: WalOption = "",
    tables: TablesOption = None,
    metrics_port: MetricsPort = None,
    listen: Listen = None,
    address: NodeAddress = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    roles: Annotated[str, typer.Option(help="Roles of this node, comma separated; all of them by default.")] = "",
    name: Annotated[
        str, typer.Option(help="Name of this node in its cluster; the host and the process by default.")
    ] = "",
    processes: Annotated[
        int, typer.Option(min=1, help="Processes to divide the roles among, below one that watches them.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses as one line of JSON.")] = False,
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
    follow: Annotated[str, typer.Option("--follow", hidden=True)] = "",
) -> None:
    """Run a node until SIGTERM or SIGINT, and drain it: what was acknowledged is durable, always.

    It joins the cluster of its log: the nodes there share the work, and any of them may end at any moment.

    Settings come from the options, then the environment (TIDEWAL__METRICS__PORT), then the file; without --wal they
    choose the log, by mq.type. Without --data and a directory in the settings everything is kept in ./tidewal-data.
    """
    if end_with_stdin:
        end_with_parent()
    import uvloop

    from ..runtime.config.loading import load_settings
    from ..runtime.signals import Interrupted, until_stopped

    configure(log_level or LogLevel.info, log_format or LogFormat.text)  # for what is said of the settings themselves
    arguments = setting_arguments(
        wal, metrics_port, log_level, log_format, tables=tables, listen=listen, address=address
    )
    settings = load_settings(config, arguments=arguments)
    log = settings.log
    configure(log.level, log.format)
    if processes > 1:
        _run_divided(
            processes,
            settings,
            roles,
            name=name,
            data=data,
            config=config,
            wal=wal,
            tables=tables,
            log_level=log_level,
            log_format=log_format,
            listen=listen,
            address=address,
            as_json=as_json,
        )
        return
    try:
        with failures_as_lines(log.format):
            uvloop.run(until_stopped(_serve(settings, data, roles, name, as_json=as_json, follow=follow)))
    except Interrupted:
        if not as_json:
            typer.echo("drained")


async def _serve(settings: Settings, data: Path | None, roles: str, name: str, *, as_json: bool, follow: str) -> None:
    """Be a node, and print where it is reached once it is ready. `follow` is the URL of the log that it had, where its
    supervisor starts it again: it may have been migrated since."""
    from ..actors.standalone import log_url, standalone, tables_of
    from ..runtime.garbage import collect_rarely
    from ..runtime.log.redaction import shown_url
    from ..runtime.node_name import node_name

    home, embedded = _places(settings, data)
    offered = [role.strip() for role in roles.split(",")] if roles else ROLE_NAMES
    configure(settings.log.level, settings.log.format, node=name or node_name())
    try:
        url = await log_url(home, settings, embedded=embedded)
    except PositionMismatch:
        if not follow:
            raise
        url = follow  # the tables are those of the log in its place
    if data is None and not settings.tables:
        _warn_of_other_tables(url, home)
    async with standalone(home, wal=url, settings=settings, name=name, roles=offered, follow=bool(follow)) as node:
        where = {"wal": shown_url(url), "tables": tables_of(home, settings)}
        if settings.metrics.port:
            where["metrics"] = f"http://{settings.metrics.host}:{settings.metrics.port}/metrics"
        if node.node.connections.address:
            where["address"] = node.node.connections.address
        print_addresses(where, as_json)
        collect_rarely()
        await node.run()


def _places(settings: Settings, data: Path | None) -> tuple[Path, Path]:
    """The directory of the node, and that of an embedded log, as seen from the first where `data` is given."""
    from ..runtime.config.loading import embedded_directory

    if data:
        return data, Path("log")
    configured = Path((not settings.wal and embedded_directory(settings)) or DEFAULT_DATA / "log")
    return configured.parent, configured.absolute()


def _run_divided(processes: int, settings: Settings, roles: str, **options: Any) -> None:
    from .processes import run_processes

    if roles:
        raise InvalidRequest("--processes divides all roles; give either that or --roles", argument="roles")
    at = settings.cluster.listens_on
    if at is not None and at.port:
        raise InvalidRequest("--processes needs a port for each process: listen on port 0", argument="listen")
    run_processes(processes, settings, **options)


def _warn_of_other_tables(url: str, home: Path) -> None:
    """Warn where the log at `url` lies in the directory of a node, whose tables are not those of `home`."""
    parts = urlsplit(url)
    directory = Path(unquote(parts.path)).parent
    if not parts.netloc and (directory / "tables").is_dir() and directory != home.absolute():
        _log.warning(
            "%s has tables beside this log, and this node keeps its tables in %s: with --data %s it goes on with those",
            directory,
            home.absolute() / "tables",
            directory,
        )
