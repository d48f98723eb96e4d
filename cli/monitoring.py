"""`tidewal monitoring`: the alert rules and the dashboard, as files of a person's own."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from ..runtime.errors import DirectoryUnwritable
from .results import AsJson

SHIPPED = {
    "prometheus/alerts.yml": "rules for Prometheus: rule_files of prometheus.yml",
    "grafana/dashboards/tidewal.json": "dashboard for Grafana: Dashboards, New, Import",
}
"""The files of `compose/` that the package has, and what each is for."""


def monitoring(
    into: Annotated[Path, typer.Argument(metavar="DIR", help="Directory for the files; made where it is not.")],
    as_json: AsJson = False,
) -> None:
    """Write the alert rules for Prometheus and the dashboard for Grafana into the directory DIR.

    Files of the same names are replaced: run it again after an update of Tidewal.
    """
    written = {into / Path(name).name: purpose for name, purpose in SHIPPED.items()}
    try:
        into.mkdir(parents=True, exist_ok=True)
        for name, path in zip(SHIPPED, written, strict=True):
            path.write_bytes((files("tidewal") / "compose" / name).read_bytes())
    except OSError as error:
        why = f"{into} cannot be written: {error.strerror}; name another directory"
        raise DirectoryUnwritable(why, path=str(into)) from error
    if as_json:
        typer.echo(json.dumps([str(path) for path in written]))
    else:
        for path, purpose in written.items():
            typer.echo(f"{path}  {purpose}")
