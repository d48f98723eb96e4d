"""The errors of Tidewal, as `tidewal.errors`: those of `runtime/errors.py`."""

from .runtime.errors import *  # noqa: F403 -- one list of errors, there
