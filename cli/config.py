"""`tidewal config`: the settings that a node would have, and where each of them came from."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from ..runtime.config.described import canonical_key, described_settings, shown_value
from .logging_setup import LogFormatArgument, LogLevelArgument
from .results import AsJson, print_rows
from .setting_options import ConfigFile, MetricsPort, WalOption, setting_arguments

config: typer.Typer = typer.Typer(help="Show the settings of a node, and where they come from.", no_args_is_help=True)


@config.command()
def show(
    file: ConfigFile = None,
    wal: WalOption = "",
    metrics_port: MetricsPort = None,
    log_level: LogLevelArgument = None,
    log_format: LogFormatArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="Show those at their defaults, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show each setting that is not at its default: its value, and the file, environment variable or option that
    gives it.

    The other options are those of `tidewal run` that are settings (--data is none): this shows what it would run with.
    Secrets are hidden.
    """
    settings = described_settings(file, arguments=setting_arguments(wal, metrics_port, log_level, log_format))
    found = [each for each in settings if everything or each.value != each.default]
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=2, default=str))
    elif found:
        rows = ({"setting": each.key, "value": shown_value(each.value), "from": each.source} for each in found)
        print_rows(("setting", "value", "from"), rows)
    else:
        typer.echo("all settings are at their defaults")


@config.command()
def explain(
    key: Annotated[str, typer.Argument(help="A setting, as mq.mqBufSize; upper and lower case are the same.")],
    file: ConfigFile = None,
    wal: WalOption = "",
    metrics_port: MetricsPort = None,
    log_level: LogLevelArgument = None,
    log_format: LogFormatArgument = None,
    as_json: AsJson = False,
) -> None:
    """Show one setting: its value, where that comes from, its default, its type, and what it does."""
    known = canonical_key(key)
    settings = described_settings(file, arguments=setting_arguments(wal, metrics_port, log_level, log_format))
    found = next(each for each in settings if each.key == known)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2, default=str))
        return
    typer.echo(f"{found.key} = {shown_value(found.value)}")
    for name, text in (
        ("from", found.source),
        ("default", shown_value(found.default) or "empty"),
        ("type", found.type),
        ("meaning", found.meaning),
    ):
        typer.echo(f"  {name:8} {text}")
