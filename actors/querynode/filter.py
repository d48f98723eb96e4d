"""Filters: expressions of `grammar.py` compiled against a schema into a mask over whole columns, never by `eval`."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lark import Token
from lark.exceptions import VisitError
from lark.visitors import Transformer_NonRecursive

from ...runtime.errors import InvalidFilter, TidewalError
from ...runtime.filters.grammar import parse, unquote
from ...runtime.rows.schema import CollectionSchema
from . import expressions
from .expressions import Evaluate, Expression, ValueKind

MAX_CACHED_FILTERS: Final = 256

_KINDS: Final[dict[str, ValueKind]] = {
    "bool": ValueKind.BOOL,
    "int8": ValueKind.INTEGER,
    "int16": ValueKind.INTEGER,
    "int32": ValueKind.INTEGER,
    "int64": ValueKind.INTEGER,
    "float": ValueKind.SINGLE,
    "double": ValueKind.DOUBLE,
    "varchar": ValueKind.STRING,
    "timestamp": ValueKind.TIME,
    "float_vector": ValueKind.VECTOR,
}


@dataclass(frozen=True, slots=True)
class Filter:
    """A compiled filter: safe to keep, to share between threads, and to use on any rows that have its `columns`."""

    text: str
    columns: frozenset[str]
    _evaluate: Evaluate

    def mask(self, rows: pa.RecordBatch | pa.Table) -> npt.NDArray[np.bool_]:
        """True for each row the filter holds for; a row for which that is unknown is not selected.

        Raises `InvalidFilter` when integers overflow.
        """
        result = self._evaluate(rows)
        if isinstance(result, pa.Scalar):
            return np.full(rows.num_rows, result.as_py() is True)
        if result.null_count:
            result = result.fill_null(cast(Any, False))
        return result.to_numpy(zero_copy_only=False)


@lru_cache(maxsize=MAX_CACHED_FILTERS)
def compile_filter(text: str, schema: CollectionSchema) -> Filter:
    """The filter of that text on a collection.

    Raises `InvalidFilter(position)`: it does not parse, names an unknown column, mixes types, or passes
    `MAX_FILTER_LENGTH` or `MAX_FILTER_DEPTH`.
    """
    tree = parse(text)
    compiler = _Compiler(schema)
    try:
        result = cast(Expression, compiler.transform(tree))
    except VisitError as error:
        if isinstance(error.orig_exc, TidewalError):
            raise error.orig_exc from None
        raise
    if result.kind is not ValueKind.BOOL:
        raise InvalidFilter(f"the filter is {result.kind.value}, a condition is needed", position=result.position)
    return Filter(text, frozenset(compiler.columns), result.evaluate)


class _Compiler(Transformer_NonRecursive):  # pyright: ignore[reportMissingTypeArgument] -- generic in stubs only
    """Turns the syntax tree into typed expressions from its leaves up; one method per rule of the grammar."""

    def __init__(self, schema: CollectionSchema) -> None:
        super().__init__()
        self.columns: set[str] = set()
        self._schema = schema

    def column(self, children: list[Token]) -> Expression:
        name = str(children[0])
        position = _position(children[0])
        field = self._schema.find(name)
        if field is None:
            near = get_close_matches(name, [each.name for each in self._schema.fields], 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidFilter(f"at {position}: no column {name!r}{hint}", position=position)
        self.columns.add(name)
        return expressions.column(name, _KINDS[field.type], position)

    def member(self, children: list[Token]) -> Expression:
        position = _position(children[0])
        raise InvalidFilter(f"at {position}: columns have no members, {children[0]} neither", position=position)

    def integer(self, children: list[Token]) -> Expression:
        position = _position(children[0])
        if len(children[0]) > 20:
            raise InvalidFilter(f"at {position}: the integer does not fit in 64 bits", position=position)
        return expressions.literal(int(children[0]), position)

    def decimal(self, children: list[Token]) -> Expression:
        return expressions.literal(float(children[0]), _position(children[0]))

    def text(self, children: list[Token]) -> Expression:
        return expressions.literal(unquote(children[0]), _position(children[0]))

    def truth(self, children: list[Token]) -> Expression:
        return expressions.literal(children[0].lower() == "true", _position(children[0]))

    def signed(self, children: list[Token | Expression]) -> Expression:
        sign, operand = cast("tuple[Token, Expression]", tuple(children))
        return expressions.signed(str(sign), operand, _position(sign))

    def addition(self, children: list[Token | Expression]) -> Expression:
        operands, operators = _alternating(children)
        result = operands[0]
        for operator, operand in zip(operators, operands[1:], strict=True):
            result = expressions.arithmetic(result, operator, operand)
        return result

    multiplication = addition

    def predicate(self, children: list[Token | Expression]) -> Expression:
        """`a < b <= c` means `a < b and b <= c`."""
        operands, operators = _alternating(children)
        pairs = zip(operands, operators, operands[1:], strict=False)
        comparisons = [expressions.compare(left, operator, right) for left, operator, right in pairs]
        return comparisons[0] if len(comparisons) == 1 else expressions.conjunction(comparisons)

    def items(self, children: list[Expression]) -> list[Expression]:
        return children

    def contained(self, children: list[object], negated: bool = False) -> Expression:
        return expressions.contained(
            cast(Expression, children[0]), cast("list[Expression]", children[-1]), negated=negated
        )

    def not_contained(self, children: list[object]) -> Expression:
        return self.contained(children, negated=True)

    def like(self, children: list[object], negated: bool = False) -> Expression:
        pattern = cast(Token, children[-1])
        return expressions.like(
            cast(Expression, children[0]), unquote(pattern, pattern=True), _position(pattern), negated=negated
        )

    def not_like(self, children: list[object]) -> Expression:
        return self.like(children, negated=True)

    def is_null(self, children: list[object]) -> Expression:
        return expressions.is_null(cast(Expression, children[0]), negated=False)

    def is_not_null(self, children: list[object]) -> Expression:
        return expressions.is_null(cast(Expression, children[0]), negated=True)

    def negation(self, children: list[object]) -> Expression:
        return expressions.negation(cast(Expression, children[1]), _position(cast(Token, children[0])))

    def conjunction(self, children: list[Expression]) -> Expression:
        return expressions.conjunction(children)

    def disjunction(self, children: list[Expression]) -> Expression:
        return expressions.disjunction(children)


def _alternating(children: list[Token | Expression]) -> tuple[list[Expression], list[str]]:
    """Operands and the operators between them."""
    return cast("list[Expression]", children[0::2]), [str(each) for each in children[1::2]]


def _position(token: Token) -> int:
    return token.start_pos or 0
