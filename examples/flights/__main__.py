"""`python -m examples.flights` in a checkout of Tidewal."""

from __future__ import annotations

import sys

from tidewal import errors

from .command import app

FAILED = 2  # exit status for an error that Tidewal or the demo raised on purpose; a defect keeps its traceback

try:
    app(prog_name="python -m examples.flights")
except errors.TidewalError as error:
    print(f"{type(error).__name__}: {' '.join(error.message.split())}", file=sys.stderr)
    raise SystemExit(FAILED) from None
