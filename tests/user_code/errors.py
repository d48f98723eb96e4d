"""Errors as a user handles them, for mypy and pyright in their strict modes, as `actors.py` is."""

from __future__ import annotations

import tidewal


def shown(error: tidewal.errors.InvalidFilter, text: str) -> str:
    """What is right of a filter, and the name of the parameter that is wrong."""
    parameter: str | None = error.parameter
    _ = error.positon  # type: ignore
    return text[: error.position] + (parameter or "")


def place(error: tidewal.errors.InvalidRows) -> tuple[str, int]:
    """Each field has its own type."""
    row: str = error.row  # type: ignore
    return (error.column or row, error.row or 0)


def start(error: tidewal.errors.PositionLost) -> tidewal.FromId | tidewal.From:
    """Go on where the log does."""
    if error.first_available is None:
        return tidewal.From.LATEST
    return tidewal.FromId(error.first_available, inclusive=True)


def again(error: tidewal.TidewalError) -> bool:
    """Of all errors."""
    _ = error.limit  # type: ignore
    return error.retryable and not error.outcome_unknown
