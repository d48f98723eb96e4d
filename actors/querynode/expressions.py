"""Typed expressions over whole columns, with SQL's three-valued logic: an unknown (null) part makes the whole unknown.

Integers are computed in 64 bits and divide towards zero, as in Milvus; a division by zero is unknown. An integer
compared with a double is compared as a double; a literal compared with a `float` column is rounded to `float` first,
so `ratio == 0.1` finds what was written as 0.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, TypeAlias, cast

import pyarrow as pa
from pyarrow import compute

from ...runtime.errors import InvalidFilter

MAX_FILTER_DEPTH: Final = 256  # nested operations

# The stubs have one overload for arrays and one for scalars; here it is not known which of them comes.
pc: Any = compute

Column: TypeAlias = "pa.Array[Any] | pa.ChunkedArray[Any] | pa.Scalar[Any]"
Rows: TypeAlias = pa.RecordBatch | pa.Table
Evaluate: TypeAlias = Callable[[Rows], Column]
Literal: TypeAlias = bool | int | float | str

_TIME: Final = pa.timestamp("us", tz="UTC")
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1

_comparisons: dict[str, Callable[[Column, Column], Column]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


class ValueKind(Enum):
    """What an expression's values are, in the words of error messages."""

    INTEGER = "an integer"
    SINGLE = "a float"
    DOUBLE = "a double"
    STRING = "a string"
    BOOL = "a bool"
    TIME = "a timestamp"
    VECTOR = "a vector"


_NUMBERS: Final = frozenset({ValueKind.INTEGER, ValueKind.SINGLE, ValueKind.DOUBLE})


@dataclass(frozen=True, slots=True)
class Expression:
    """A part of a filter: `evaluate` gives its value for every row; `literal` is set when it is one value for all.

    Raises `InvalidFilter` when it is nested deeper than `MAX_FILTER_DEPTH`.
    """

    kind: ValueKind
    evaluate: Evaluate
    position: int
    depth: int = 1
    literal: Literal | None = None

    def __post_init__(self) -> None:
        if self.depth > MAX_FILTER_DEPTH:
            raise InvalidFilter(
                f"at {self.position}: nested deeper than MAX_FILTER_DEPTH, {MAX_FILTER_DEPTH}", position=self.position
            )


def column(name: str, kind: ValueKind, position: int) -> Expression:
    """The values of a column."""
    return Expression(kind, lambda rows: cast(Column, rows.column(name)), position)


def literal(value: Literal, position: int) -> Expression:
    """One value. The range of an integer is checked where it is used, because its sign is yet to come."""
    kinds = {bool: ValueKind.BOOL, int: ValueKind.INTEGER, float: ValueKind.DOUBLE, str: ValueKind.STRING}

    def evaluate(_: Rows) -> Column:
        return pa.scalar(value)

    return Expression(kinds[type(value)], evaluate, position, literal=value)


def signed(sign: str, operand: Expression, position: int) -> Expression:
    """The number, or with "-" the number turned round."""
    _need_number(operand)
    if sign == "+":
        return operand
    if operand.literal is not None and not isinstance(operand.literal, str):
        return literal(-operand.literal, position)
    return arithmetic(literal(0, position), "-", operand)


def arithmetic(left: Expression, operator: str, right: Expression) -> Expression:
    """`left operator right` for + - * / and, between integers, %."""
    for operand in (left, right):
        _need_number(operand)
        _need_int64(operand)
    integers = left.kind is right.kind is ValueKind.INTEGER
    if operator == "%" and not integers:
        raise _mismatch(right, "% works between integers only")
    if operator in "/%" and right.literal == 0:
        raise _mismatch(right, "division by zero")
    target = pa.int64() if integers else pa.float64()
    operate = _operators[operator]
    position = right.position

    def evaluate(rows: Rows) -> Column:
        try:
            return operate(_as(left.evaluate(rows), target), _as(right.evaluate(rows), target))
        except pa.ArrowInvalid as error:
            raise InvalidFilter(f"at {position}: integer overflow in {operator}: {error}", position=position) from None

    return Expression(ValueKind.INTEGER if integers else ValueKind.DOUBLE, evaluate, left.position, _depth(left, right))


def compare(left: Expression, operator: str, right: Expression) -> Expression:
    """`left operator right`; strings beside timestamps are read as ISO 8601, UTC where they name no zone."""
    target = _common_type(left, right)
    if target == pa.bool_() and operator not in ("==", "!="):
        raise _mismatch(right, f"bools have no order for {operator}")
    function = _comparisons[operator]
    first, second = _operand(left, target), _operand(right, target)
    return Expression(
        ValueKind.BOOL, lambda rows: function(first(rows), second(rows)), left.position, _depth(left, right)
    )


def contained(operand: Expression, items: Sequence[Expression], negated: bool) -> Expression:
    """Whether the value is among the items; unknown for an unknown value."""
    target = _common_type(operand, *items) if items else pa.null()
    constants = [_constant(item, target) for item in items]
    if 0.0 in constants and pa.types.is_floating(target):  # Arrow looks them up by their bits
        constants += [0.0, -0.0]
    values = pa.array(constants, target) if items else None

    def evaluate(rows: Rows) -> Column:
        found = operand.evaluate(rows)
        inside = pc.is_in(_as(found, target), value_set=values) if values is not None else _false_for(found)
        known = pc.if_else(pc.is_valid(found), inside, pa.scalar(None, pa.bool_()))
        return pc.invert(known) if negated else known

    return Expression(ValueKind.BOOL, evaluate, operand.position, _depth(operand))


def like(operand: Expression, pattern: str, position: int, negated: bool) -> Expression:
    """Whether the string matches a pattern of % (any text) and _ (one character)."""
    if operand.kind is not ValueKind.STRING:
        raise _mismatch(operand, f"like works on strings, this is {operand.kind.value}")
    try:
        pc.match_like(pa.array([""]), pattern)
    except pa.ArrowInvalid as error:
        raise InvalidFilter(f"at {position}: not a pattern: {error}", position=position) from None

    def evaluate(rows: Rows) -> Column:
        matches = pc.match_like(operand.evaluate(rows), pattern)
        return pc.invert(matches) if negated else matches

    return Expression(ValueKind.BOOL, evaluate, operand.position, _depth(operand))


def is_null(operand: Expression, negated: bool) -> Expression:
    """Whether the value is unknown; itself never unknown."""
    _need_int64(operand)
    function = pc.is_valid if negated else pc.is_null
    return Expression(ValueKind.BOOL, lambda rows: function(operand.evaluate(rows)), operand.position, _depth(operand))


def negation(operand: Expression, position: int) -> Expression:
    """`not operand`."""
    _need_bool(operand)
    return Expression(ValueKind.BOOL, lambda rows: pc.invert(operand.evaluate(rows)), position, _depth(operand))


def conjunction(operands: Sequence[Expression]) -> Expression:
    """All of them."""
    return _fold(pc.and_kleene, operands)


def disjunction(operands: Sequence[Expression]) -> Expression:
    """Any of them."""
    return _fold(pc.or_kleene, operands)


def _fold(function: Callable[[Column, Column], Column], operands: Sequence[Expression]) -> Expression:
    for operand in operands:
        _need_bool(operand)

    def evaluate(rows: Rows) -> Column:
        result = operands[0].evaluate(rows)
        for operand in operands[1:]:
            result = function(result, operand.evaluate(rows))
        return result

    return Expression(ValueKind.BOOL, evaluate, operands[0].position, _depth(*operands))


def _common_type(left: Expression, *others: Expression) -> pa.DataType:
    """The Arrow type in which all of them are compared."""
    operands = (left, *others)
    for operand in operands:
        _need_int64(operand)
    kinds = {operand.kind for operand in operands}
    if ValueKind.VECTOR in kinds:
        raise _mismatch(left, "vectors cannot be compared; search them")
    if kinds <= _NUMBERS:
        varying = {operand.kind for operand in operands if operand.literal is None} or kinds
        if kinds == {ValueKind.INTEGER}:
            return pa.int64()
        return pa.float32() if varying == {ValueKind.SINGLE} else pa.float64()
    if kinds == {ValueKind.STRING}:
        return pa.string()
    if kinds == {ValueKind.BOOL}:
        return pa.bool_()
    if kinds == {ValueKind.TIME}:
        return _TIME
    if kinds == {ValueKind.TIME, ValueKind.STRING} and all(
        each.literal is not None for each in operands if _is_text(each)
    ):
        return _TIME
    odd = next(each for each in others if each.kind is not left.kind)
    if left.literal is not None and odd.literal is None:  # what was written is wrong, not what the column is
        odd, left = left, odd
    raise _mismatch(odd, f"{odd.kind.value} cannot be compared with {left.kind.value}")


def _operand(expression: Expression, target: pa.DataType) -> Evaluate:
    """How to get the expression's values in the type of the comparison."""
    if expression.literal is not None:
        constant = pa.scalar(_constant(expression, target), target)
        return lambda rows: constant
    return lambda rows: _as(expression.evaluate(rows), target)


def _constant(expression: Expression, target: pa.DataType) -> Literal | datetime:
    """The value of a literal in the type of the comparison."""
    value = expression.literal
    if value is None:
        raise _mismatch(expression, "only literals can stand here")
    if target != _TIME:
        return float(value) if pa.types.is_floating(target) else value
    try:
        time = datetime.fromisoformat(str(value))
    except ValueError:
        raise _mismatch(expression, f"{value!r} is not an ISO 8601 time") from None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time


def _as(values: Column, target: pa.DataType) -> Column:
    # Unsafe on purpose: a large integer beside a double is rounded, where the safe cast would refuse the whole column.
    return values if values.type == target else values.cast(target, safe=False)


def _divide(left: Column, right: Column) -> Column:
    nothing = pc.cast(None, right.type)
    return pc.divide_checked(left, pc.if_else(pc.equal(right, pc.cast(0, right.type)), nothing, right))


def _remainder(left: Column, right: Column) -> Column:
    # -1 divides everything; asking the processor to divide the smallest integer by it would overflow.
    divisor = pc.if_else(pc.equal(right, -1), pc.cast(1, right.type), right)
    return pc.subtract(left, pc.multiply(_divide(left, divisor), divisor))


_operators: dict[str, Callable[[Column, Column], Column]] = {
    "+": pc.add_checked,
    "-": pc.subtract_checked,
    "*": pc.multiply_checked,
    "/": _divide,
    "%": _remainder,
}


def _false_for(values: Column) -> Column:
    return pc.and_(pc.is_valid(values), pa.scalar(False))


def _is_text(expression: Expression) -> bool:
    return expression.kind is ValueKind.STRING


def _depth(*parts: Expression) -> int:
    return 1 + max(part.depth for part in parts)


def _need_bool(operand: Expression) -> None:
    if operand.kind is not ValueKind.BOOL:
        raise _mismatch(operand, f"a condition is needed, this is {operand.kind.value}")


def _need_number(operand: Expression) -> None:
    if operand.kind not in _NUMBERS:
        raise _mismatch(operand, f"a number is needed, this is {operand.kind.value}")


def _need_int64(operand: Expression) -> None:
    value = operand.literal
    if isinstance(value, int) and not _INT64_MIN <= value <= _INT64_MAX:
        raise _mismatch(operand, f"{value} does not fit in 64 bits")


def _mismatch(expression: Expression, message: str) -> InvalidFilter:
    return InvalidFilter(f"at {expression.position}: {message}", position=expression.position)
