"""`python -m examples.flights` in a checkout of Tidewal."""

from __future__ import annotations

from tidewal.cli.main import main

from .command import app

main(application=app, name="python -m examples.flights")
