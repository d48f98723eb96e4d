"""The demo's command: its options, its directory, and its exit status."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
import uvloop

from tidewal import errors
from tidewal.runtime import INTERRUPTED, Interrupted, shown_url, until_stopped

from .moto_store import MotoStore
from .place import clear, place_of
from .requirements import require
from .screen import Screen
from .story import Demo, DemoOptions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

DISAGREED = 1
SERVED_PORT = 9091  # Milvus' own
TABLES = "s3://tidewal-demo"  # on a store of the demo's own


class StoreKind(StrEnum):
    """The object stores that the demo can start."""

    moto = "moto"


@app.command()
def demo(
    events: Annotated[int | None, typer.Option(min=1, help="Only the first so many events of 1,001,615.")] = None,
    spark: Annotated[bool, typer.Option("--spark/--no-spark", help="With Spark, which needs a JDK.")] = True,
    keep: Annotated[Path | None, typer.Option(help="Work in this directory and keep it; resume what is there.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Keep the node and its /metrics up until Ctrl-C.")] = False,
    metrics_port: Annotated[int | None, typer.Option(help=f"Port of /metrics; {SERVED_PORT} with --serve.")] = None,
    wal: Annotated[
        str,
        typer.Option(help="URL of the log: kafka://…, pulsar://…, s3://…; RocksMQ in the directory by default."),
    ] = "",
    tables: Annotated[
        str, typer.Option(help="Prefix of a bucket for the tables: s3://…; in the directory by default.")
    ] = "",
    store: Annotated[
        StoreKind | None,
        typer.Option(help="Start this object store, which keeps the tables, and a log at s3://…, until the demo ends."),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw the delays; in the directory by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, the story to stderr.")] = False,
) -> None:
    """Replay a year of real flights through a node, query it, and prove that all its readers agree.

    The exit status is 0 when everything agreed, 1 when not, 130 when it was interrupted; then the directory is kept,
    and --keep with it goes on from there.
    """
    require(spark=spark)
    place_of(Path(), wal)  # a wrong URL is refused before anything is created
    if store and keep:
        raise errors.InvalidRequest("--store keeps nothing behind the demo's end: give either that or --keep")
    directory = keep or Path(tempfile.mkdtemp(prefix="tidewal-demo-"))
    url, ours = place_of(directory, wal)
    picture = picture or (directory / "picture.png" if keep else Path("tidewal-demo.png"))
    port = metrics_port if metrics_port is not None else SERVED_PORT if serve else 0
    screen = Screen(to_stderr=as_json)
    stored = store is not None and urlsplit(url).scheme == "s3"  # the log ends with the store
    given = tables or (TABLES if store else "")
    place = f"{given.rstrip('/')}/{directory.name}" if given else str(directory.absolute() / "tables")
    story = Demo(DemoOptions(directory, events, spark, serve, url, place, port, picture), screen)
    try:
        with ExitStack() as stack:
            if store:
                moto = stack.enter_context(MotoStore())
                os.environ.update(moto.environment)
                for each in (given, url) if stored else (given,):
                    moto.create_bucket(urlsplit(each).netloc)
            uvloop.run(until_stopped(story.run()))
    except Interrupted:
        if story.agreed is None:
            screen.say()
            how = f"--keep {directory}" + (f" --wal '{shown_url(wal)}'" if wal else "")
            how += f" --tables '{tables}'" if tables else ""
            screen.say(f'Interrupted; nothing is lost. It goes on with: make demo ARGS="{how}"')
            raise typer.Exit(INTERRUPTED) from None
    finally:
        if keep is None and story.agreed:
            if ours and not stored:
                try:
                    uvloop.run(clear(url))
                except errors.TidewalError as error:
                    screen.say(f"What the demo wrote is still in {shown_url(url)}: {error.message}")
            shutil.rmtree(directory, ignore_errors=True)
    if as_json:
        typer.echo(json.dumps(story.figures, default=str))
    if not story.agreed:
        raise typer.Exit(DISAGREED)
