"""The command `tidewal`. The module of a command is imported when that is called."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_group

from ..runtime.errors import DirectoryUnwritable, TidewalError
from ..runtime.extras import missing_extra
from .one_line import one_line

STDERR = 2
FAILED = 2  # exit status for an error that Tidewal raised on purpose

COMMANDS = {
    "run": "Run a node until SIGTERM or SIGINT, and drain it: what was acknowledged is durable, always.",
    "create": "Create a collection; where it is there already with the same fields and shards, say so and succeed.",
    "list": "List the collections of a node: their rows, shards, primary key and fields.",
    "describe": "Show a collection: its rows, shards, primary key, and its fields with their types.",
    "load": "Have QueryNodes get a collection into memory, and wait until its queries can be answered.",
    "release": "Let no QueryNode have a collection in memory; it is written and stored as before.",
    "drop": "Drop a collection with its rows and its tables, for good.",
    "insert": "Write rows into a collection, in batches; a row whose key exists replaces that row.",
    "apply": "Write changes into a collection, in batches: the column _op of each row says insert, upsert or delete.",
    "delete": "Delete rows by their keys, or those for which a filter holds.",
    "query": "Print the rows for which a filter holds: all without one.",
    "search": "Print the rows nearest to a vector, the nearest first, with their distances.",
    "compact": "Store what is acknowledged in the collection's tables, and bring `current`, its present rows, forward "
    "to that.",
    "topics": "Topics: create, list, describe, alter, drop, send, cancel, tail.",
    "send": "Send messages to a channel, and say how many and what the last one's timestamp is: they are durable then.",
    "status": "Show health, lag, sizes and what is near its limit: of the node that runs on a log, and of the log.",
    "tail": "Print the records of a channel: a line for each with its type and fields, and its rows where the schema "
    "is known.",
    "inspect": "Show what a log has: its channels with their policies, the catalog and the stored cuts; or its "
    "cluster's nodes.",
    "evict": "End the lease of a cluster's node, so that others get what it has.",
    "drain": "Move all channels of a node to others, and wait until it has none.",
    "cordon": "Let a node get no more channels; it keeps what it has.",
    "uncordon": "Let a node that was cordoned or drained get channels again.",
    "move": "Move a pchannel to a node, and wait until it takes appends there.",
    "pin": "Let a pchannel be on a node whenever that one is there.",
    "balance": "Say whether channels move for balance, or show how they lie.",
    "level": "Show the feature level of a cluster, hold it before an upgrade, or let it rise.",
    "catalog": "The collections of a log as a file, and collections from such a file: export, import.",
    "groups": "Show consumer groups, move their positions, drop them.",
    "dlq": "Dead letters, what readers and groups could not use: show, replay, drop.",
    "verify": "Check stored data without changing it, and what many nodes rest on.",
    "salvage": "Copy all that can be read of a log that no process has open into the new directory NEW, and report "
    "what is damaged and lost; without NEW only report.",
    "migrate": "Copy all that a log has to another one, prove that both are equal, and let that one take its place.",
    "replicate": "Mirror all that a log has, and what comes to it, into a replica, until SIGTERM or SIGINT.",
    "promote": "Bring a replica into use, in the place of its source.",
    "spark": "Run Spark over collections and topics: look, count, export, copy.",
    "monitoring": "Write the alert rules for Prometheus and the dashboard for Grafana into the directory DIR.",
    "config": "Show the settings of a node, and where they come from.",
    "doctor": "Show what is installed, what is missing, and what to do about it.",
}
"""Each command, and what `tidewal --help` says of it: the first paragraph of its own help."""

FUNCTIONS = {
    "list": ("collections", "list_collections"),
    "describe": ("collections", "describe"),
    "load": ("collections", "load"),
    "release": ("collections", "release"),
    "drop": ("collections", "drop"),
    "delete": ("collections", "delete"),
    "apply": ("insert", "apply"),
    "promote": ("replicate", "promote"),
    **{name: ("placement", name) for name in ("drain", "cordon", "uncordon", "move", "pin", "balance")},
}
"""Module and function of the commands that share a module; each other one is the function of its name in its own."""


class LazyCommands(TyperGroup):
    """Commands of which only name and help are known, until one is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load(name), rest

    def invoke(self, ctx: Any) -> Any:
        """Names the nearest known value where an option has a few, and got another one."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message += _nearest_choice(error)
            raise


def _nearest_choice(error: typer.BadParameter) -> str:
    said = re.search(r"'([^']*)' is not one of (.*)", error.message)
    near = get_close_matches(said[1].lower(), re.findall("'([^']*)'", said[2]), n=1) if said else []
    return f" Did you mean {near[0]!r}?" if near else ""


def load(name: str) -> Any:
    """The command `name`, imported."""
    module, function = FUNCTIONS.get(name, (name, name))
    command = getattr(import_module(f".{module}", __package__), function)
    holder = typer.Typer()
    if isinstance(command, typer.Typer):
        holder.add_typer(command, name=name)
    else:
        holder.command(name)(command)
    return get_group(holder).commands[name]


app: typer.Typer = typer.Typer(
    name="tidewal",
    cls=LazyCommands,
    help="A streaming runtime in which the log is the system.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tidewal {version('tidewal')}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction] -- typer keeps it
    version: Annotated[  # read by its callback
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _only_announced() -> None:
    """What `tidewal --help` lists; `LazyCommands` calls the command itself."""


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_only_announced)


def main(arguments: Sequence[str] | None = None, application: typer.Typer = app, name: str = "tidewal") -> None:
    """Run a command of `application`, which its help calls `name`, and exit: 0 when it worked, 2 with one line for an
    error that Tidewal raised on purpose.

    Any other exception is a defect and keeps its traceback.
    """
    _open_missing()
    try:
        application(args=arguments, prog_name=name)
    except TidewalError as error:
        _fail(error)
    except PermissionError as error:  # of a path that was given: a file of rows, tables, the directory of a log
        _fail(_forbidden(error))
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        _fail(missing)


def _open_missing() -> None:
    """Where standard input, output or errors are closed, the null device takes their place. Else a file of the log
    would get the number of one, be read as input, and be written to by what a library prints."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(file, True)
    os.close(file)


def _forbidden(error: PermissionError) -> TidewalError:
    where = error.filename or error
    return DirectoryUnwritable(f"permission denied: {where}: run this as the user that owns it", path=str(where))


def _fail(error: TidewalError) -> NoReturn:
    line = one_line(" ".join(error.message.split()))
    print(f"tidewal: {type(error).__name__}: {line}", file=sys.stderr)
    raise SystemExit(FAILED) from None
