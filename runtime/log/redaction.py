"""What errors, logs and tools show of URLs: the location of a log, never the credentials for it."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

from ..errors import ConfigError

HIDDEN = "***"

_URL = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*:)?(?://)?)([^?#]*)([?#]?)(.*)", re.DOTALL)
_LOGIN = re.compile(r"/+[^/]*:[^/]*@")  # behind one slash too few or too many, where a path would begin
_ENDPOINT = re.compile(r"endpoint=https?(://|%3A%2F%2F)[A-Za-z0-9.-]+((:|%3A)[0-9]{1,5})?/?", re.IGNORECASE)
_NAMED = re.compile(r"([A-Za-z][A-Za-z0-9_.-]*)=")


def shown_url(url: str) -> str:
    """`url` without user info and without the values of its query: `pulsar://broker:6650/public/default?token=***`.

    Takes any text and never fails: errors show malformed URLs above all, so a slash, `?` or `#` that a password
    should have had as %2F, %3F or %23 ends nothing here. All values are hidden, since only the adapter knows which
    of its options are secret, but for an `endpoint` that is a host and a port: it is a part of the place.
    A path of this machine keeps its `@`."""
    parts = _URL.fullmatch(url)
    assert parts is not None  # every part may be empty
    scheme, place, mark, options = parts.groups()
    if not place.startswith(("/", ".")) or scheme.endswith(":") or _LOGIN.match(place):
        if "@" in place:
            place = f"{HIDDEN}@{place.rpartition('@')[2]}"
        elif "@" in options:
            place = HIDDEN
    return scheme + place + mark + ("&".join(map(_shown_option, options.split("&"))) if mark else "")


def split_url(url: str) -> SplitResult:
    """`urlsplit` of a log's URL, which raises `ConfigError` instead of a `ValueError` that holds the URL's text."""
    try:
        return urlsplit(url)
    except ValueError:
        raise ConfigError(f"{shown_url(url)!r} is no URL", key="wal") from None


def _shown_option(option: str) -> str:
    if _ENDPOINT.fullmatch(option):
        return option
    named = _NAMED.match(option)
    return f"{named[1]}={HIDDEN}" if named else HIDDEN
