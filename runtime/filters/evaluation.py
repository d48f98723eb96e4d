"""Typed expressions over the header of one record, with SQL's three-valued logic: None is unknown.

A header is the tuple that `runtime/log/record.py` writes. What has no value there, or one of another type than the
operation takes, is unknown, and so is what comes of it: a number that does not fit in 64 bits, a division by zero, NaN.
Integers divide towards zero. Bytes are text where they are UTF-8, else unknown. A bool is no number.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias, cast

from ..errors import InvalidFilter

MAX_RECORD_FILTER_DEPTH: Final = 64  # nested operations

Header: TypeAlias = Sequence[Any]
Scalar: TypeAlias = bool | int | float | str
Evaluation: TypeAlias = Callable[[Header], "Scalar | None"]

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_COMPARISONS: Final[dict[str, Callable[[Scalar, Scalar], bool]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_MIRRORED: Final = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


class ScalarKind(Enum):
    """What an operand is, in the words of error messages; ANY is known only with a record at hand."""

    NUMBER = "a number"
    STRING = "a string"
    BOOL = "a bool"
    ANY = "a tag"


@dataclass(frozen=True, slots=True)
class Operand:
    """A part of a filter: `evaluate` gives its value for a header; `literal` is set where it is one value for all.

    Raises `InvalidFilter` where it is nested deeper than `MAX_RECORD_FILTER_DEPTH`.
    """

    kind: ScalarKind
    evaluate: Evaluation
    position: int
    depth: int = 1
    literal: Scalar | None = None

    def __post_init__(self) -> None:
        if self.depth > MAX_RECORD_FILTER_DEPTH:
            limit = f"MAX_RECORD_FILTER_DEPTH, {MAX_RECORD_FILTER_DEPTH}"
            raise _invalid(self.position, f"nested deeper than {limit}")


def literal(value: Scalar, position: int) -> Operand:
    """One value. The range of an integer is checked where it is used, because its sign is yet to come."""
    return Operand(_kind_of(value), lambda _: value, position, literal=value)


def tag(name: str, tags_at: int, position: int) -> Operand:
    """The value of a tag."""

    def evaluate(header: Header) -> Scalar | None:
        value = header[tags_at].get(name)
        return _text_of(value) if type(value) is bytes else value

    return Operand(ScalarKind.ANY, evaluate, position)


def header_field(kind: ScalarKind, read: Evaluation, position: int) -> Operand:
    """The value of a field, as `read` finds it in a header."""
    return Operand(kind, read, position)


def signed(sign: str, operand: Operand, position: int) -> Operand:
    """The number, or with "-" the number turned round."""
    _need(ScalarKind.NUMBER, operand)
    value = operand.literal
    if sign == "+":
        return operand
    if isinstance(value, int | float):
        return literal(-value, position)
    return arithmetic(literal(0, position), "-", operand)


def arithmetic(left: Operand, symbol: str, right: Operand) -> Operand:
    """`left symbol right` for + - * / and, between integers, %."""
    for each in (left, right):
        _need(ScalarKind.NUMBER, each)
        _need_int64(each)
    if symbol in "/%" and right.literal == 0:
        raise _invalid(right.position, "division by zero")
    first, second, operate = left.evaluate, right.evaluate, _OPERATIONS[symbol]

    def evaluate(header: Header) -> Scalar | None:
        one, other = first(header), second(header)
        if not (_is_number(one) and _is_number(other)):
            return None
        try:
            result = operate(cast(float, one), cast(float, other))
        except (ZeroDivisionError, OverflowError):
            return None
        return None if isinstance(result, int) and not _INT64_MIN <= result <= _INT64_MAX else result

    return Operand(ScalarKind.NUMBER, evaluate, left.position, _depth(left, right))


def compare(left: Operand, symbol: str, right: Operand) -> Operand:
    """`left symbol right`, of two values of one kind."""
    kind = _common_kind(left, right)
    if kind is ScalarKind.BOOL and symbol not in ("==", "!="):
        raise _invalid(right.position, f"bools have no order for {symbol}")
    if left.literal is not None and right.literal is None:
        left, symbol, right = right, _MIRRORED[symbol], left
    first, second, function = left.evaluate, right.evaluate, _COMPARISONS[symbol]
    depth, position = _depth(left, right), left.position
    if right.literal is not None:
        return Operand(ScalarKind.BOOL, _compared_with(first, function, right.literal), position, depth)
    ordered = symbol not in ("==", "!=")

    def evaluate(header: Header) -> Scalar | None:
        one, other = first(header), second(header)
        if one is None or other is None or not _comparable(one, other) or (ordered and isinstance(one, bool)):
            return None
        return function(one, other)

    return Operand(ScalarKind.BOOL, evaluate, position, depth)


def _compared_with(first: Evaluation, function: Callable[[Scalar, Scalar], bool], value: Scalar) -> Evaluation:
    """The comparison with one value, the most frequent."""
    wanted = type(value)

    def same_type(header: Header) -> Scalar | None:
        found: Any = first(header)
        return function(found, value) if type(found) is wanted else None

    def number(header: Header) -> Scalar | None:
        found: Any = first(header)
        return function(found, value) if _is_number(found) else None

    return same_type if isinstance(value, bool | str) else number


def contained(operand: Operand, items: Sequence[Operand], *, negated: bool) -> Operand:
    """Whether the value is among the items; unknown for a value of another kind than theirs."""
    kind = _common_kind(operand, *items)
    values = frozenset(item.literal for item in items)
    evaluate_operand, kinds = operand.evaluate, _TYPES[kind]

    def evaluate(header: Header) -> Scalar | None:
        found = evaluate_operand(header)
        if type(found) not in kinds or found != found:
            return None
        return (found in values) is not negated

    return Operand(ScalarKind.BOOL, evaluate, operand.position, _depth(operand))


def like(operand: Operand, pattern: str, *, negated: bool) -> Operand:
    """Whether the string matches a pattern of % (any text) and _ (one character)."""
    _need(ScalarKind.STRING, operand)
    evaluate_operand, matches = operand.evaluate, _matcher(pattern)

    def evaluate(header: Header) -> Scalar | None:
        found = evaluate_operand(header)
        return matches(found) is not negated if isinstance(found, str) else None

    return Operand(ScalarKind.BOOL, evaluate, operand.position, _depth(operand))


def is_null(operand: Operand, *, negated: bool) -> Operand:
    """Whether the value is unknown; itself never unknown."""
    _need_int64(operand)
    evaluate = operand.evaluate
    return Operand(
        ScalarKind.BOOL, lambda header: (evaluate(header) is None) is not negated, operand.position, _depth(operand)
    )


def negation(operand: Operand, position: int) -> Operand:
    """`not operand`."""
    condition_of = condition(operand).evaluate

    def evaluate(header: Header) -> Scalar | None:
        found = condition_of(header)
        return None if found is None else not found

    return Operand(ScalarKind.BOOL, evaluate, position, _depth(operand))


def conjunction(operands: Sequence[Operand]) -> Operand:
    """All of them."""
    return _folded(operands, decisive=False)


def disjunction(operands: Sequence[Operand]) -> Operand:
    """Any of them."""
    return _folded(operands, decisive=True)


def _folded(operands: Sequence[Operand], *, decisive: bool) -> Operand:
    """One `decisive` value decides; without it an unknown one leaves it unknown."""
    parts = [condition(operand).evaluate for operand in operands]

    def evaluate(header: Header) -> Scalar | None:
        result: bool | None = not decisive
        for part in parts:
            found = part(header)
            if found is decisive:
                return decisive
            if found is None:
                result = None
        return result

    return Operand(ScalarKind.BOOL, evaluate, operands[0].position, _depth(*operands))


def condition(operand: Operand) -> Operand:
    """The operand where a condition is needed: a tag that is no bool is unknown there."""
    _need(ScalarKind.BOOL, operand)
    if operand.kind is ScalarKind.BOOL:
        return operand
    evaluate = operand.evaluate

    def bool_or_unknown(header: Header) -> Scalar | None:
        found = evaluate(header)
        return found if isinstance(found, bool) else None

    return Operand(ScalarKind.BOOL, bool_or_unknown, operand.position, operand.depth)


# ---- values ----------------------------------------------------------------------------------------------------------

_TYPES: Final[dict[ScalarKind, tuple[type, ...]]] = {
    ScalarKind.NUMBER: (int, float),
    ScalarKind.STRING: (str,),
    ScalarKind.BOOL: (bool,),
    ScalarKind.ANY: (int, float, str, bool),
}


def _kind_of(value: Scalar) -> ScalarKind:
    return next(kind for kind, types in _TYPES.items() if type(value) in types)


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and value == value)


def _comparable(one: Scalar, other: Scalar) -> bool:
    return type(one) is type(other) is not float or (_is_number(one) and _is_number(other))


def _text_of(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _divide(one: float, other: float) -> float:
    if isinstance(one, int) and isinstance(other, int):
        quotient = abs(one) // abs(other)
        return quotient if (one < 0) is (other < 0) else -quotient
    return one / other


def _remainder(one: float, other: float) -> float:
    if not (isinstance(one, int) and isinstance(other, int)):
        raise ZeroDivisionError  # % works between integers: of others it is unknown
    return one - cast(int, _divide(one, other)) * other


_OPERATIONS: Final[dict[str, Callable[[float, float], float]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": _remainder,
}


def _matcher(pattern: str) -> Callable[[str], bool]:
    """A pattern of `like` as a function. The time that it takes grows with the length of text and pattern multiplied,
    at most: each part between two wildcards % is looked for from where the one before it ended, and never again."""
    tokens = re.findall(r"\\[%_\\]|.", pattern, re.DOTALL)
    parts: list[list[str]] = [[]]
    for token in tokens:
        if token == "%":
            parts.append([])
        else:
            parts[-1].append("." if token == "_" else re.escape(token[-1]))
    first, *others = [re.compile("".join(part), re.DOTALL) for part in parts]
    if not others:
        return lambda text: first.fullmatch(text) is not None
    *middle, last = others
    last_length = len(parts[-1])

    def matches(text: str) -> bool:
        found = first.match(text)
        for part in middle:
            if found is None:
                return False
            found = part.search(text, found.end())
        end = len(text) - last_length
        return found is not None and end >= found.end() and last.fullmatch(text, end) is not None

    return matches


# ---- checks ----------------------------------------------------------------------------------------------------------


def _common_kind(left: Operand, *others: Operand) -> ScalarKind:
    operands = (left, *others)
    for operand in operands:
        _need_int64(operand)
    known = [operand for operand in operands if operand.kind is not ScalarKind.ANY]
    for other in known:
        if other.kind is not known[0].kind:
            raise _invalid(other.position, f"{other.kind.value} cannot be compared with {known[0].kind.value}")
    return known[0].kind if known else ScalarKind.ANY


def _need(kind: ScalarKind, operand: Operand) -> None:
    if operand.kind not in (kind, ScalarKind.ANY):
        needed = "a condition" if kind is ScalarKind.BOOL else kind.value
        raise _invalid(operand.position, f"{needed} is needed, this is {operand.kind.value}")


def _need_int64(operand: Operand) -> None:
    value = operand.literal
    if isinstance(value, int) and not _INT64_MIN <= value <= _INT64_MAX:
        raise _invalid(operand.position, f"{value} does not fit in 64 bits")


def _depth(*parts: Operand) -> int:
    return 1 + max(part.depth for part in parts)


def _invalid(position: int, message: str) -> InvalidFilter:
    return InvalidFilter(f"at {position}: {message}", position=position)
