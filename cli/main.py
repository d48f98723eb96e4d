"""The command `tidewal`. Each command lives in a module of its own and is registered here."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from ..runtime.errors import TidewalError
from .doctor import doctor
from .groups import groups
from .inspect import inspect
from .run import run
from .salvage import salvage
from .spark import spark
from .tail import tail
from .verify import verify

FAILED = 2  # exit status for an error that Tidewal raised on purpose

app = typer.Typer(
    name="tidewal",
    help="A streaming runtime in which the log is the system.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:  # pyright: ignore[reportUnusedFunction] -- typer keeps it: one command alone would lose its name
    pass


for _command in (run, tail, inspect, doctor, salvage):
    app.command()(_command)
app.add_typer(verify, name="verify")
app.add_typer(groups, name="groups")
app.add_typer(spark, name="spark")


def main(arguments: Sequence[str] | None = None, application: typer.Typer = app, name: str = "tidewal") -> None:
    """Run a command of `application`, which its help calls `name`, and exit: 0 when it worked, 2 with one line for an
    error that Tidewal raised on purpose.

    Any other exception is a defect and keeps its traceback.
    """
    try:
        application(args=arguments, prog_name=name)
    except TidewalError as error:
        line = " ".join(error.message.split())
        print(f"tidewal: {type(error).__name__}: {line}", file=sys.stderr)
        raise SystemExit(FAILED) from None
