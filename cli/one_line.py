"""What others wrote, as commands and log lines show it: it begins no line of its own, and no terminal obeys it."""

from __future__ import annotations

import re

# what ends a line or commands a terminal, and what turns the direction of the text around it
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def one_line(text: str) -> str:
    """`text` with its control characters as Python writes them: a line feed as backslash and n."""
    return _CONTROLS.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
