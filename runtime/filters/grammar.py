"""The grammar of filters of queries and subscriptions: Milvus' boolean expressions, parsed by LALR(1) without
recursion.

    origin == "JFK" and (dep_delay > 15 or air_time is null) and 6 <= hour < 12
    carrier in ["AA", "B6"] and tailnum like "N1%" and not (distance / 2 % 7 == 3)
    scheduled >= "2013-07-01T00:00:00Z"

Words are case-insensitive; `&&`, `||` and `!` mean and, or, not. Binding from loose to tight: or, and, not,
comparisons, `+ -`, `* / %`, sign. Items stand in brackets or in parentheses. Strings stand in single or double quotes
and know the escapes of JSON, `\\" \\\\ \\/ \\b \\f \\n \\r \\t \\uXXXX`, and `\\'`. In a pattern of `like`, `\\%` and
`\\_` stay as they are, which tells them from its wildcards `%` (any text) and `_` (one character). No other character
can stand behind a backslash. In `NAME["TEXT"]` the text names a member: `tags["content-type"]`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final, cast

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from ..errors import InvalidFilter

MAX_FILTER_LENGTH: Final = 64 * 1024  # characters

_GRAMMAR: Final = r"""
?start: disjunction
?disjunction: conjunction (_OR conjunction)*
?conjunction: negation (_AND negation)*
?negation: NOT negation
         | predicate
?predicate: addition (COMPARISON addition)*
          | addition IN items               -> contained
          | addition NOT IN items           -> not_contained
          | addition LIKE STRING            -> like
          | addition NOT LIKE STRING        -> not_like
          | addition IS NULL                -> is_null
          | addition IS NOT NULL            -> is_not_null
?addition: multiplication (SIGN multiplication)*
?multiplication: signed (FACTOR signed)*
?signed: SIGN signed
       | atom
?atom: literal
     | NAME                            -> column
     | NAME "[" STRING "]"             -> member
     | "(" disjunction ")"
?literal: INTEGER                      -> integer
        | FLOAT                        -> decimal
        | STRING                       -> text
        | BOOL                         -> truth
items: "[" [element ("," element)* [","]] "]"
     | "(" element ("," element)* [","] ")"
?element: SIGN literal                 -> signed
        | literal

_OR.2: /or\b/i | "||"
_AND.2: /and\b/i | "&&"
NOT.2: /not\b/i | /!(?!=)/
IN.2: /in\b/i
LIKE.2: /like\b/i
IS.2: /is\b/i
NULL.2: /null\b/i
BOOL.2: /(true|false)\b/i
COMPARISON: "==" | "!=" | "<=" | ">=" | "<" | ">"
SIGN: "+" | "-"
FACTOR: "*" | "/" | "%"
NAME: /(?!(?:and|or|not|in|like|is|null|true|false)\b)[a-z_][a-z0-9_]*/i
FLOAT.2: /(\d+\.\d*|\.\d+)([eE][+-]?\d+)?|\d+[eE][+-]?\d+/
INTEGER: /\d+/
STRING: /"(\\.|[^"\\])*"|'(\\.|[^'\\])*'/s
%ignore /\s+/
"""

_WORDS: Final[dict[str, str]] = {
    "_OR": "or",
    "_AND": "and",
    "NOT": "not",
    "IN": "in",
    "LIKE": "like",
    "IS": "is",
    "NULL": "null",
    "BOOL": "true or false",
    "COMPARISON": "a comparison",
    "SIGN": "+ or -",
    "FACTOR": "*, / or %",
    "NAME": "a column",
    "FLOAT": "a number",
    "INTEGER": "a number",
    "STRING": "a string",
    "LSQB": "[",
    "RSQB": "]",
    "LPAR": "(",
    "RPAR": ")",
    "COMMA": ",",
    "$END": "the end",
}

_ESCAPES: Final[dict[str, str]] = {
    **{each: each for each in "\"'\\/"},
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
}
_PATTERN_ESCAPES: Final = {**_ESCAPES, "%": "\\%", "_": "\\_"}
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)


def parse(text: str) -> Tree[Token]:
    """The syntax tree of a filter.

    Raises `InvalidFilter(position)` for text that is too long (`MAX_FILTER_LENGTH`) or does not parse; the message
    says what was expected there.
    """
    if len(text) > MAX_FILTER_LENGTH:
        raise InvalidFilter(
            f"the filter has {len(text)} characters, the limit MAX_FILTER_LENGTH is {MAX_FILTER_LENGTH}",
            position=MAX_FILTER_LENGTH,
        )
    try:
        return _parser().parse(text)
    except UnexpectedInput as error:
        raise _explain(text, error) from None


def unquote(token: Token, *, pattern: bool = False) -> str:
    """The value of a string token, which is a `pattern` of `like` or not.

    Raises `InvalidFilter(position)` for an escape that there is not, and for one of half a character.
    """
    body = token[1:-1]
    if "\\" not in body:
        return body
    start, escapes = (token.start_pos or 0) + 1, _PATTERN_ESCAPES if pattern else _ESCAPES

    def character(escape: re.Match[str]) -> str:
        if escape[1]:
            return chr(int(escape[1], 16))
        if escape[2] in escapes:
            return escapes[escape[2]]
        raise _no_escape(escape[0], start + escape.start())

    value = _ESCAPE.sub(character, body)
    try:
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")  # joins the halves that JSON makes
    except UnicodeDecodeError:
        raise InvalidFilter(f"at {start - 1}: the string has half a character", position=start - 1) from None


def _no_escape(escape: str, position: int) -> InvalidFilter:
    known = r"\" \' \\ \/ \b \f \n \r \t \uXXXX, and \% \_ in a pattern of like"
    return InvalidFilter(
        f"at {position}: {escape} is no escape; known are {known}; a backslash is \\\\", position=position
    )


def quote(value: str) -> str:
    """The string that `unquote` reads as `value`."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


@cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, parser="lalr", lexer="contextual", maybe_placeholders=False)


def _explain(text: str, error: UnexpectedInput) -> InvalidFilter:
    position = error.pos_in_stream
    if position is None or position < 0:
        position = len(text)
    expected: set[str] = set()
    found = repr(text[position : position + 1])
    if isinstance(error, UnexpectedToken):
        expected = error.accepts or error.expected or expected
        if error.token.type == "$END":
            position, found = len(text), "the end"
        else:
            found = repr(str(cast(Token, error.token)))
    elif isinstance(error, UnexpectedCharacters):
        expected = error.allowed or set()
    words = ", ".join(sorted({_WORDS.get(name, name) for name in expected}))
    meant = "; did you mean ==?" if found == "'='" and "COMPARISON" in expected else ""
    return InvalidFilter(f"at {position}: found {found}, expected {words}{meant}", position=position)
