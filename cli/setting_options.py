"""The options of commands that are settings, and what becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path | None, typer.Option("--config", help="A YAML file of settings, keys as in milvus.yaml.")]


def _url_of(wal: str) -> str:
    from ..runtime.config.loading import url_of

    return url_of(wal)


WalOption = Annotated[
    str,
    typer.Option(
        "--wal",
        help="The log: its URL, or the directory of an embedded one; by default that of the settings, an embedded one "
        "below --data.",
        callback=_url_of,
    ),
]
TablesOption = Annotated[
    str | None,
    typer.Option(
        "--tables",
        help="Where the tables lie: a directory or s3://bucket/prefix; by default that of the settings, or below "
        "--data.",
    ),
]
MetricsPort = Annotated[int | None, typer.Option(help="Port of /metrics and /healthz; 0 is off.")]
Listen = Annotated[
    str | None, typer.Option(help="host:port where the node takes direct connections of other nodes; none by default.")
]
NodeAddress = Annotated[
    str | None, typer.Option("--address", help="host:port where other nodes reach that; as --listen by default.")
]


def setting_arguments(
    wal: str,
    metrics_port: int | None,
    log_level: str | None = None,
    log_format: str | None = None,
    *,
    tables: str | None = None,
    listen: str | None = None,
    address: str | None = None,
) -> dict[str, object]:
    """The `arguments` of `load_settings` that these options are; None for an option that is not given."""
    return {
        "wal": wal or None,
        "tables": tables,
        "metrics.port": metrics_port,
        "log.level": log_level,
        "log.format": log_format,
        "cluster.listen": listen,
        "cluster.address": address,
    }
