"""`tidewal spark`: pipelines that are ready to run, on a Spark that this command starts."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import typer

from ..runtime.config.loading import url_of
from ..runtime.errors import ConfigError
from ..runtime.log.names import DEFAULT_PREFIX
from ..spark_bridge.log import open_log
from ..spark_bridge.options import EARLIEST, LATEST, ReadOptions
from . import spark_pipelines as pipelines
from .logging_setup import logged
from .open_log import LogUrl, Prefix
from .results import JsonLines
from .spark_running import spark_session

spark: typer.Typer = typer.Typer(
    help="Run Spark over collections and topics: look, count, export, copy.", no_args_is_help=True
)


class Format(StrEnum):
    """The files that `export` can write."""

    parquet = "parquet"
    orc = "orc"
    json = "json"


Name = Annotated[str, typer.Argument(help="A collection, or with --topic names of channels by comma.")]
Topic = Annotated[bool, typer.Option("--topic", help="NAME is a channel of messages, not a collection.")]
Begin = Annotated[str, typer.Option("--from", help="startingOffsets of the source; a checkpoint has precedence.")]
Given = Annotated[list[str], typer.Option("--option", "-o", metavar="NAME=VALUE", help="Any option of the source.")]
Conf = Annotated[list[str], typer.Option(metavar="NAME=VALUE", help="A setting of Spark, as spark.driver.memory=4g.")]
Master = Annotated[str, typer.Option(help="Where Spark runs.")]
Once = Annotated[bool, typer.Option("--once", help="End when everything that is there now is done.")]
Every = Annotated[str, typer.Option(help="How often a micro-batch begins.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Serve /metrics and /healthz there; 0: nowhere.")]

LOCAL = "local[2]"
NONE: list[str] = []


@spark.command()
@logged
def tail(
    url: LogUrl,
    name: Name,
    topic: Topic = False,
    begin: Begin = LATEST,
    once: Once = False,
    rows: Annotated[int, typer.Option(min=0, help="Rows shown of each micro-batch; with --json all are.")] = 20,
    as_json: JsonLines = False,
    option: Given = NONE,
    conf: Conf = NONE,
    master: Master = LOCAL,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Print the rows of each micro-batch, which is one consistent line across all channels, as it comes."""
    source = _source(url, name, topic, prefix, begin, option)
    _check(source, streaming=True)
    with spark_session("tail", master, _pairs("conf", conf)) as session:
        pipelines.tail(session, source, once=once, rows=rows, as_json=as_json)


@spark.command()
@logged
def count(
    url: LogUrl,
    name: Name,
    topic: Topic = False,
    window: Annotated[str, typer.Option(help="The length of a window of log time.")] = "1 minute",
    by: Annotated[list[str], typer.Option(help="A column to count by; of a collection the default is _op.")] = NONE,
    follow: Annotated[bool, typer.Option("--follow", help="Go on: print each window once, when it is over.")] = False,
    begin: Begin = EARLIEST,
    as_json: JsonLines = False,
    option: Given = NONE,
    conf: Conf = NONE,
    master: Master = LOCAL,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Count rows by windows of log time. Nothing comes late to one: a micro-batch holds all rows up to its cut."""
    source = _source(url, name, topic, prefix, begin, option)
    _check(source, streaming=follow)
    with spark_session("count", master, _pairs("conf", conf)) as session:
        pipelines.count(session, source, window=window, by=by, follow=follow, as_json=as_json)


@spark.command()
@logged
def export(
    url: LogUrl,
    name: Name,
    directory: Annotated[str, typer.Argument(help="Where the files go: a path or URL of a file system of Spark's.")],
    topic: Topic = False,
    begin: Begin = EARLIEST,
    form: Annotated[Format, typer.Option("--format", help="What is written.")] = Format.parquet,
    checkpoint: Annotated[str, typer.Option(help="Where the position is kept; default DIRECTORY/_checkpoint.")] = "",
    once: Once = False,
    every: Every = "10 seconds",
    metrics_port: Port = 0,
    as_json: JsonLines = False,
    option: Given = NONE,
    conf: Conf = NONE,
    master: Master = LOCAL,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Write all row versions to files, each exactly once however often this is stopped and started again.

    Read the files through Spark, or through what else knows DIRECTORY/_spark_metadata: after a crash there may be
    files that do not count.
    """
    source = _source(url, name, topic, prefix, begin, option)
    _check(source, streaming=True)
    with spark_session("export", master, _pairs("conf", conf)) as session:
        pipelines.export(
            session,
            source,
            form=form.value,
            directory=directory,
            checkpoint=checkpoint or f"{directory.rstrip('/')}/_checkpoint",
            running=pipelines.Running(once=once, every=every, metrics_port=metrics_port, as_json=as_json),
        )


@spark.command()
@logged
def copy(
    url: LogUrl,
    name: Name,
    checkpoint: Annotated[str, typer.Option(help="Where the position is stored; with it each row is copied once.")],
    to_collection: Annotated[str, typer.Option(help="The collection to write into; it must be there.")] = "",
    to_topic: Annotated[str, typer.Option(help="The channel to write into; it must be there.")] = "",
    to_wal: Annotated[str, typer.Option(help="The log to write into; default: the same.", callback=url_of)] = "",
    topic: Topic = False,
    begin: Begin = EARLIEST,
    once: Once = False,
    every: Every = "1 second",
    metrics_port: Port = 0,
    as_json: JsonLines = False,
    option: Given = NONE,
    conf: Conf = NONE,
    master: Master = LOCAL,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Copy a collection into another one, or into a topic as JSON; or a topic into another one.

    Inserts, upserts and deletes stay what they are. Each row is copied exactly once.
    """
    if bool(to_collection) == bool(to_topic):
        raise ConfigError("say where to: --to-collection or --to-topic", key="to")
    if topic and to_collection:
        raise ConfigError("messages of a topic do not become rows of a collection by themselves", key="to-collection")
    source = _source(url, name, topic, prefix, begin, option)
    _check(source, streaming=True)
    target = {"wal": to_wal or url, "prefix": prefix}
    target |= {"collection": to_collection} if to_collection else {"topic": to_topic}
    with spark_session("copy", master, _pairs("conf", conf)) as session:
        pipelines.copy(
            session,
            source,
            target,
            checkpoint=checkpoint,
            running=pipelines.Running(once=once, every=every, metrics_port=metrics_port, as_json=as_json),
        )


def _source(url: str, name: str, topic: bool, prefix: str, begin: str, option: list[str]) -> dict[str, str]:
    """The options of the source. Those given with --option have precedence."""
    given = _pairs("option", option)
    named = {key.lower() for key in given}
    usual = {"wal": url, "topic" if topic else "collection": name, "prefix": prefix, "startingOffsets": begin}
    return {key: value for key, value in usual.items() if key.lower() not in named} | given


def _check(source: Mapping[str, str], *, streaming: bool) -> None:
    """Raise what is wrong with the options before Java starts."""
    open_log(ReadOptions.parse(source, streaming=streaming).wal).close()


def _pairs(what: str, given: list[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise ConfigError(f"--{what} is NAME=VALUE, not {key + equals!r}", key=what)
    return {key: value for key, _, value in pairs}
