"""The parameters of a filter, as in Milvus: `page == {page}` and their values apart from it.

Values become literals of the grammar, each with spaces around it, so none can be read as anything else: neither a quote
in a text nor two values side by side change what the filter says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from numbers import Real
from operator import index
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ...runtime.errors import InvalidFilter
from ...runtime.filters.grammar import quote
from ...runtime.nearest import nearest

Scalar: TypeAlias = str | int | float | bool | date
FilterParams: TypeAlias = Mapping[str, Scalar | Sequence[Scalar] | npt.NDArray[np.generic] | None]
"""The values of a filter's parameters by their names."""

# Strings first, also one that does not end: what stands in them is text.
_PARTS: Final = re.compile(r""""(?:\\.|[^"\\])*(?:"|\\?\Z)|'(?:\\.|[^'\\])*(?:'|\\?\Z)|\{([^{}]*)\}""", re.DOTALL)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BEFORE_NULL: Final = re.compile(r"\bis(\s+not)?\s*$", re.IGNORECASE)


def with_values(filter: str | None, params: Mapping[str, object] | None) -> str | None:
    """The filter with the value of each `{name}` in its place, as a literal; in strings braces are text.

    A value is a text, an integer of 64 bits, a float, a bool, a datetime or date (UTC where it has no zone), a list of
    these (beside `in`), or None (behind `is` and `is not`). Raises `InvalidFilter(parameter)` for a parameter without a
    value, a value without a parameter, and a value that cannot stand there.
    """
    params = params or {}
    if filter is None or ("{" not in filter and not params):
        _refuse_unused(params, set())
        return filter
    used: set[str] = set()

    def literal(part: re.Match[str]) -> str:
        name = part[1]
        if name is None:
            return part[0]
        used.add(name)
        return _literal(name, params, part)

    filled = _PARTS.sub(literal, filter)
    _refuse_unused(params, used)
    return filled


@contextmanager
def parameters_named(filter: str | None, params: Mapping[str, object] | None) -> Generator[None]:
    """In this block an `InvalidFilter` about `with_values(filter, params)` names the parameter whose value is at its
    position, unless it names one already."""
    try:
        yield
    except InvalidFilter as error:
        if filter is None or not params or error.position is None or error.parameter is not None:
            raise
        name = _parameter_at(error.position, filter, params)
        if name is None:
            raise
        fields = {**error.fields, "parameter": name}
        raise InvalidFilter(f"{error.message} (the value of the parameter {name!r})", **fields) from None


def _parameter_at(position: int, filter: str, params: Mapping[str, object]) -> str | None:
    """The parameter whose value is at a position of the filter with its values; None where none is."""
    grown = 0  # by how much the values before a part are longer than their names
    for part in _PARTS.finditer(filter):
        if (name := part[1]) is not None:
            start, length = part.start() + grown, len(_literal(name, params, part))
            if start <= position < start + length:
                return name
            grown += length - len(part[0])
    return None


def _refuse_unused(params: Mapping[str, object], used: set[str]) -> None:
    for name in params:
        if name not in used:
            raise InvalidFilter(
                f"the filter does not use its parameter {name!r}{nearest(str(name), used)}; "
                "a parameter is a name in braces, {name}, outside of quotes",
                parameter=name,
            )


def _literal(name: str, params: Mapping[str, object], part: re.Match[str]) -> str:
    return f" {_value_of(name, params, part)} "


def _value_of(name: str, params: Mapping[str, object], part: re.Match[str]) -> str:
    """The literal of a parameter at the place of `part`."""
    if not _NAME.fullmatch(name):
        raise InvalidFilter(f"at {part.start()}: {part[0]} is no parameter: {{name}} is", position=part.start())
    if name not in params:
        raise InvalidFilter(
            f"at {part.start()}: filter_params has no value of the parameter {name!r}{nearest(name, map(str, params))}",
            position=part.start(),
            parameter=name,
        )
    value = params[name]
    if value is None:
        if _BEFORE_NULL.search(part.string, 0, part.start()):
            return "null"
        raise _unfit(name, f"is None, and null is equal to nothing: ask with `is null`, or `is {{{name}}}`")
    if isinstance(value, np.ndarray):
        value = _python_values(cast("npt.NDArray[np.generic]", value))
    if _is_list(value):
        return "[" + ", ".join(_scalar(name, each, "has ") for each in cast("Iterable[object]", value)) + "]"
    return _scalar(name, value)


def _python_values(array: npt.NDArray[np.generic] | np.generic) -> object:
    """As Python has them; of times as datetimes, where NumPy makes numbers of units below the microsecond."""
    return cast(object, (array.astype("datetime64[us]") if array.dtype.kind == "M" else array).tolist())


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping)


def _scalar(name: str, value: object, verb: str = "is ") -> str:
    """One value as a literal. Subclasses (enumerations, NumPy's scalars) count as what they are subclasses of."""
    if isinstance(value, str):
        return _text(name, value)
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if hasattr(value, "__index__"):
        number = index(cast(int, value))
        if not -(2**63) <= number < 2**63:
            raise _unfit(name, f"{verb}{number}, which does not fit in 64 bits")
        return str(number)
    if isinstance(value, np.datetime64):
        value = _python_values(cast(np.generic, value))
    if isinstance(value, date):
        return quote(value.isoformat())
    if isinstance(value, Real):
        return _float(name, float(value))
    raise _unfit(
        name, f"{verb}a value of {type(value).__name__}: give a text, a number, a bool, a datetime, or a list of these"
    )


def _text(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _unfit(name, "has a lone surrogate, which is no character") from None
    return quote(value)


def _float(name: str, value: float) -> str:
    if math.isnan(value):
        raise _unfit(name, "is NaN, which no row has: null says unknown")
    return repr(value) if math.isfinite(value) else f"{'-' if value < 0 else ''}1e999"  # read as infinity


def _unfit(name: str, why: str) -> InvalidFilter:
    return InvalidFilter(f"the filter's parameter {name!r} {why}", parameter=name)
