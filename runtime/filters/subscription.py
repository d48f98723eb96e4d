"""The filter that a subscription names. Light: what parses expressions is loaded where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .record_filter import RecordFilter

FILTER_LANGUAGE: Final = 1  # what expressions mean: processes that differ in it do not filter for each other


def filter_of(where: str | None) -> RecordFilter | None:
    """The compiled filter of the expression `where`; None for none. Raises `InvalidFilter`."""
    if where is None:
        return None
    from .record_filter import compile_record_filter

    return compile_record_filter(where)
