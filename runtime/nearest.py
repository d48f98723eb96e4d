"""What a misspelt name may mean."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error's sentence that names the known name most like `name`; "" where none is like it."""
    found = get_close_matches(name, list(known), n=1)
    return f"; the nearest known one is {found[0]!r}" if found else ""
