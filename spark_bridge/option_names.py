"""The names of options, which Spark hands over in any case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from ..runtime.errors import ConfigError


def by_known_name(given: Mapping[str, str], names: Sequence[str], of: str = "") -> dict[str, str]:
    """The options `given` under their `names`. Raises `ConfigError` for one that there is not, with the nearest; `of`
    says of what the options are."""
    known = {name.lower(): name for name in names}
    for name in given:
        if name.lower() not in known:
            nearest = known[get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]]
            raise ConfigError(
                f"unknown option {name!r}{of}; did you mean {nearest!r}? Known are {', '.join(names)}",
                key=name,
                nearest=nearest,
            )
    return {known[name.lower()]: value for name, value in given.items()}
