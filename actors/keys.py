"""Primary keys as clients give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, TypeAlias, cast

import numpy as np
import pyarrow as pa

from ..runtime.errors import InvalidRequest

Keys: TypeAlias = Annotated[
    Sequence[object], "a list of primary keys (for the rows that a filter finds, query their keys first)"
]
"""Primary keys: integers or texts."""


def listed_keys(keys: object) -> list[object]:
    """Keys as a list of Python's values, also those of an array, a Series or a column of Arrow. A text is no list of
    keys: letter by letter it would name other rows (a filter, most likely)."""
    if isinstance(keys, str | bytes | Mapping) or not isinstance(keys, Iterable):
        raise InvalidRequest(f"give a list of keys, not {keys!r}", argument="keys")
    if isinstance(keys, np.ndarray) and keys.ndim != 1:
        raise InvalidRequest(f"give keys in one dimension, not an array of {keys.ndim}", argument="keys")
    return [_python_value(key) for key in cast("Iterable[object]", keys)]


def _python_value(key: object) -> object:
    if isinstance(key, np.generic):
        return cast(object, key.item())
    return cast(object, key.as_py()) if isinstance(key, pa.Scalar) else key
