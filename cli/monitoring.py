"""`tidewal monitoring`: the alert rules and the dashboard, as files of a person's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from ..runtime.errors import DirectoryUnwritable, InvalidRequest
from .results import AsJson

SHIPPED = {
    "prometheus/alerts.yml": "rules for Prometheus: rule_files of prometheus.yml",
    "grafana/dashboards/tidewal.json": "dashboard for Grafana: Dashboards, New, Import",
}
"""The files of `compose/` that the package has, and what each is for."""


def monitoring(
    into: Annotated[Path, typer.Argument(metavar="DIR", help="Directory for the files; made where it is not.")],
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that were edited, or are of another version.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the alert rules for Prometheus and the dashboard for Grafana into the directory DIR.

    A file that is there and differs is replaced only with --force: run it so after an update of Tidewal, or into
    another directory to compare.
    """
    written = {into / Path(name).name: purpose for name, purpose in SHIPPED.items()}
    contents = {
        path: (files("tidewal") / "compose" / name).read_bytes() for name, path in zip(SHIPPED, written, strict=True)
    }
    try:
        into.mkdir(parents=True, exist_ok=True)
        if not force:
            _refuse_others(contents)
        for path, content in contents.items():
            path.write_bytes(content)
    except OSError as error:
        why = f"{into} cannot be written: {error.strerror}; name another directory"
        raise DirectoryUnwritable(why, path=str(into)) from error
    if as_json:
        typer.echo(json.dumps([str(path) for path in written]))
    else:
        for path, purpose in written.items():
            typer.echo(f"{path}  {purpose}")


def _refuse_others(contents: Mapping[Path, bytes]) -> None:
    """Raise `InvalidRequest` where files are there with other contents: they may have been edited."""
    others = [str(path) for path, content in contents.items() if path.exists() and path.read_bytes() != content]
    if others:
        raise InvalidRequest(
            f"{' and '.join(others)} would be replaced, and the present contents lost: --force does so, or name "
            "another directory and compare"
        )
