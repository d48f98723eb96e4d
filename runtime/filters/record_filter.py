"""Filters of subscriptions: expressions of `grammar.py` over the tags and header fields of records, compiled once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Final, cast

from lark import Token
from lark.exceptions import VisitError
from lark.visitors import Transformer_NonRecursive

from ..errors import InvalidFilter, TidewalError
from ..log.record import CONTROL_TYPES, HEADER_FIELDS, Record, RecordType, header_of
from . import evaluation
from .evaluation import Evaluation, Header, Operand, Scalar, ScalarKind
from .grammar import parse, unquote

MAX_RECORD_FILTER_LENGTH: Final = 4096  # characters: the process that owns a log evaluates it for others
MAX_CACHED_RECORD_FILTERS: Final = 256

_AT: Final = {name: at for at, name in enumerate(HEADER_FIELDS)}
_TAGS_AT, _TYPE_AT = _AT["tags"], _AT["type"]
_CONTROL: Final = frozenset(int(each) for each in CONTROL_TYPES)
_NAMES: Final = {int(each): each.name for each in RecordType}


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """A compiled filter: safe to keep, and to share between threads. `compile_record_filter` makes it."""

    text: str
    _evaluate: Evaluation
    pattern_length: int = 0
    """Characters of all patterns of `like`: times the length of a text, that is what comparing costs at most."""

    def passes(self, record: Record) -> bool:
        """Whether the filter holds for the record; what is unknown does not hold. Control records always pass."""
        return self.passes_header(header_of(record))

    def passes_header(self, header: Header) -> bool:
        """`passes`, of a record's header alone."""
        return header[_TYPE_AT] in _CONTROL or self._evaluate(header) is True

    def holds(self, record: Record) -> bool:
        """Whether the expression holds for the record, be it a control record or not."""
        return self._evaluate(header_of(record)) is True


@lru_cache(maxsize=MAX_CACHED_RECORD_FILTERS)
def compile_record_filter(text: str) -> RecordFilter:
    """The filter of that text: `tag in ("a", "b") and priority > 3`, in the language of filters of collections.

    A name is a tag's; one with `_` before it is a field of the header: `_type` (a string such as "ROWS"), `_key`,
    `_vchannel`, `_producer`, `_trace` (strings; an empty one is no value), `_ts`, `_term`, `_cseq`, `_pseq`,
    `_schema_version` (integers). A tag whose name is no word is `tags["content-type"]`. Raises
    `InvalidFilter(position)`: it does not parse, names an unknown field, mixes types, or passes
    `MAX_RECORD_FILTER_LENGTH` or `MAX_RECORD_FILTER_DEPTH`.
    """
    if len(text) > MAX_RECORD_FILTER_LENGTH:
        raise InvalidFilter(
            f"the filter has {len(text)} characters, the limit MAX_RECORD_FILTER_LENGTH is {MAX_RECORD_FILTER_LENGTH}",
            position=MAX_RECORD_FILTER_LENGTH,
        )
    compiler = _Compiler()
    try:
        result = evaluation.condition(cast(Operand, compiler.transform(parse(text))))
    except VisitError as error:
        if isinstance(error.orig_exc, TidewalError):
            raise error.orig_exc from None
        raise
    return RecordFilter(text, result.evaluate, compiler.pattern_length)


class _Compiler(Transformer_NonRecursive):  # pyright: ignore[reportMissingTypeArgument] -- generic in stubs only
    """Turns the syntax tree into operands from its leaves up; one method per rule of the grammar."""

    def __init__(self) -> None:
        super().__init__()
        self.pattern_length: int = 0

    def column(self, children: list[Token]) -> Operand:
        name, position = str(children[0]), _position(children[0])
        return _field(name, position) if name.startswith("_") else evaluation.tag(name, _TAGS_AT, position)

    def member(self, children: list[Token]) -> Operand:
        name, position = str(children[0]), _position(children[0])
        if name != "tags":
            raise InvalidFilter(f'at {position}: only tags["NAME"] has members, not {name}', position=position)
        return evaluation.tag(unquote(children[1]), _TAGS_AT, position)

    def integer(self, children: list[Token]) -> Operand:
        position = _position(children[0])
        if len(children[0]) > 20:
            raise InvalidFilter(f"at {position}: the integer does not fit in 64 bits", position=position)
        return evaluation.literal(int(children[0]), position)

    def decimal(self, children: list[Token]) -> Operand:
        return evaluation.literal(float(children[0]), _position(children[0]))

    def text(self, children: list[Token]) -> Operand:
        return evaluation.literal(unquote(children[0]), _position(children[0]))

    def truth(self, children: list[Token]) -> Operand:
        return evaluation.literal(children[0].lower() == "true", _position(children[0]))

    def signed(self, children: list[Token | Operand]) -> Operand:
        sign, operand = cast("tuple[Token, Operand]", tuple(children))
        return evaluation.signed(str(sign), operand, _position(sign))

    def addition(self, children: list[Token | Operand]) -> Operand:
        operands, operators = _alternating(children)
        result = operands[0]
        for symbol, operand in zip(operators, operands[1:], strict=True):
            result = evaluation.arithmetic(result, symbol, operand)
        return result

    multiplication = addition

    def predicate(self, children: list[Token | Operand]) -> Operand:
        """`a < b <= c` means `a < b and b <= c`."""
        operands, operators = _alternating(children)
        pairs = zip(operands, operators, operands[1:], strict=False)
        comparisons = [evaluation.compare(left, symbol, right) for left, symbol, right in pairs]
        return comparisons[0] if len(comparisons) == 1 else evaluation.conjunction(comparisons)

    def items(self, children: list[Operand]) -> list[Operand]:
        return children

    def contained(self, children: list[object], negated: bool = False) -> Operand:
        items = cast("list[Operand]", children[-1])
        return evaluation.contained(cast(Operand, children[0]), items, negated=negated)

    def not_contained(self, children: list[object]) -> Operand:
        return self.contained(children, negated=True)

    def like(self, children: list[object], negated: bool = False) -> Operand:
        pattern = unquote(cast(Token, children[-1]), pattern=True)
        self.pattern_length += len(pattern)
        return evaluation.like(cast(Operand, children[0]), pattern, negated=negated)

    def not_like(self, children: list[object]) -> Operand:
        return self.like(children, negated=True)

    def is_null(self, children: list[object]) -> Operand:
        return evaluation.is_null(cast(Operand, children[0]), negated=False)

    def is_not_null(self, children: list[object]) -> Operand:
        return evaluation.is_null(cast(Operand, children[0]), negated=True)

    def negation(self, children: list[object]) -> Operand:
        return evaluation.negation(cast(Operand, children[1]), _position(cast(Token, children[0])))

    def conjunction(self, children: list[Operand]) -> Operand:
        return evaluation.conjunction(children)

    def disjunction(self, children: list[Operand]) -> Operand:
        return evaluation.disjunction(children)


def _field(name: str, position: int) -> Operand:
    found = _FIELDS.get(name)
    if found is None:
        near = get_close_matches(name, _FIELDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_FIELDS)}"
        raise InvalidFilter(f"at {position}: no header field {name}; {hint}", position=position)
    return evaluation.header_field(*found, position)


def _number(at: int) -> Evaluation:
    return lambda header: header[at]


def _name(at: int) -> Evaluation:
    return lambda header: header[at] or None


def _text(at: int) -> Evaluation:
    def read(header: Header) -> Scalar | None:
        try:
            return bytes(header[at]).decode() or None
        except UnicodeDecodeError:
            return None

    return read


_FIELDS: Final[dict[str, tuple[ScalarKind, Evaluation]]] = {
    "_type": (ScalarKind.STRING, lambda header: _NAMES.get(header[_TYPE_AT])),
    "_key": (ScalarKind.STRING, _text(_AT["key"])),
    **{f"_{name}": (ScalarKind.STRING, _name(_AT[name])) for name in ("vchannel", "producer", "trace")},
    **{
        f"_{name}": (ScalarKind.NUMBER, _number(_AT[name])) for name in ("ts", "term", "cseq", "pseq", "schema_version")
    },
}


def _alternating(children: Sequence[Token | Operand]) -> tuple[list[Operand], list[str]]:
    """Operands and the operators between them."""
    return cast("list[Operand]", children[0::2]), [str(each) for each in children[1::2]]


def _position(token: Token) -> int:
    return token.start_pos or 0
