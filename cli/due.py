"""When messages are due that a command sends: options --deliver-after and --deliver-at."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated

import typer

from ..runtime.errors import InvalidRequest

DeliverAfter = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Deliver the messages later: after 500ms, 90s, 5m, 2h, 7d, or seconds."),
]
DeliverAt = Annotated[
    str | None, typer.Option(metavar="MOMENT", help="Deliver the messages at an ISO 8601 time, of UTC without a zone.")
]

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "": 1}
_span = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)")


def seconds_of(text: str | None) -> float | None:
    """The seconds of an option --deliver-after. Raises `InvalidRequest`."""
    if text is None:
        return None
    found = _span.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"--deliver-after {text}: write 500ms, 90s, 5m, 2h, 7d, or seconds")
    return float(found[1]) * _UNITS_S[found[2]]


def moment_of(text: str | None) -> datetime | None:
    """The moment of an option --deliver-at. Raises `InvalidRequest`."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"--deliver-at {text}: write an ISO 8601 time, as 2030-01-31T12:00:00Z") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
