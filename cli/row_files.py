"""Rows of JSON lines, CSV and Parquet, in batches of which each row knows its line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Any, BinaryIO, TypeAlias, cast

import pyarrow as pa

from ..actors.rows import Rows, split_by_bytes
from ..runtime.errors import InvalidRows
from ..runtime.rows.schema import FLOAT_TYPES, INTEGER_TYPES, CollectionSchema

COMMA = ","
GZIP_MAGIC = b"\x1f\x8b"
BATCH_ROWS = 10_000
BATCH_BYTES = 4 * 1024 * 1024  # of text, or of Arrow's columns

EXACT_BELOW = 2**53  # a JSON number with a point is a float, which from there on may stand for another whole number

_WHOLE = re.compile(r"[+-]?\d+\.0*")  # as pandas writes integers of a column with nulls

_WANTED = {
    **dict.fromkeys(INTEGER_TYPES, "a whole number"),
    **dict.fromkeys(FLOAT_TYPES, "a number"),
    "bool": "true or false",
    "timestamp": "an ISO 8601 time",
    "float_vector": "a JSON list of numbers",
}

_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}

Convert: TypeAlias = Callable[[str], object]
_Numbered: TypeAlias = Iterator[tuple[int, int, dict[str, object]]]  # line, characters, row


class FileFormat(StrEnum):
    """What a file of rows is written in."""

    jsonl = "jsonl"
    csv = "csv"
    parquet = "parquet"


SUFFIXES = {
    ".jsonl": FileFormat.jsonl,
    ".ndjson": FileFormat.jsonl,
    ".json": FileFormat.jsonl,
    ".csv": FileFormat.csv,
    ".tsv": FileFormat.csv,
    ".parquet": FileFormat.parquet,
}


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows to write together; `place` names one of them, counted from 0, as a person finds it in the file."""

    rows: Rows
    count: int
    place: Callable[[int], str]
    header: str = ""  # where the names of the columns stand, if they do so once

    def place_of_column(self, name: str) -> str:
        """Where `name` stands first: in a row of JSON, in the header of CSV; "" where the columns have no place."""
        if not isinstance(self.rows, list):
            return ""
        if self.header:
            return self.header
        return next((self.place(number) for number, row in enumerate(self.rows) if name in row), "")

    def halves(self) -> tuple[RowBatch, RowBatch]:
        """The rows, of which there are at least two, as two batches."""
        middle, rows = self.count // 2, cast("list[dict[str, object]]", self.rows)  # a batch of Arrow is sliced alike
        first = replace(self, rows=rows[:middle], count=middle)
        place = partial(_place_behind, self.place, middle)
        return first, replace(self, rows=rows[middle:], count=self.count - middle, place=place)


def batches(
    file: BinaryIO, form: FileFormat, schema: CollectionSchema, *, delimiter: str = COMMA
) -> Iterator[RowBatch]:
    """The rows of `file`, with the values that `schema` wants where the format cannot say them (times, and all of CSV,
    whose values are between `delimiter`). Raises `InvalidRows`, which names the line, and has the field `row`."""
    if form is FileFormat.parquet:
        yield from _of_parquet(file)
        return
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    header = [""]
    numbered = _json_rows(text, schema) if form is FileFormat.jsonl else _csv_rows(text, schema, delimiter, header)
    try:
        for batch in _gathered(numbered):
            yield replace(batch, header=header[0])
    except UnicodeDecodeError as error:
        if error.object.startswith(GZIP_MAGIC):
            raise InvalidRows("standard input is gzip, which only the suffix .gz of a file says: gunzip it") from None
        raise InvalidRows(f"the file is not UTF-8: {error}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidRows(f"the file is no gzip that can be read: {error}") from None
    finally:
        with suppress(ValueError):  # the caller, whose file it is, has closed it
            text.detach()


def _gathered(numbered: _Numbered) -> Iterator[RowBatch]:
    rows: list[dict[str, object]] = []
    lines: list[int] = []
    size = 0
    for line, characters, row in numbered:
        rows.append(row)
        lines.append(line)
        size += characters
        if len(rows) == BATCH_ROWS or size >= BATCH_BYTES:
            yield RowBatch(rows, len(rows), partial(_line_of, lines))
            rows, lines, size = [], [], 0
    if rows:
        yield RowBatch(rows, len(rows), partial(_line_of, lines))


def _line_of(lines: list[int], row: int) -> str:
    return f"line {lines[row]}"


def _place_behind(place: Callable[[int], str], before: int, row: int) -> str:
    return place(before + row)


def _json_rows(text: Iterable[str], schema: CollectionSchema) -> _Numbered:
    times = [each.name for each in schema.fields if each.type == "timestamp"]
    integers = [each.name for each in schema.fields if each.type in INTEGER_TYPES]
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRows(f"line {number}: no JSON: {error}", row=number) from None
        if not isinstance(row, dict):
            raise InvalidRows(f"line {number}: {line.strip()[:50]} is no object of columns", row=number)
        found = cast("dict[str, object]", row)
        for name in times:
            if isinstance(value := found.get(name), str):
                found[name] = _converted(name, "timestamp", value, number)
        for name in integers:
            if isinstance(value := found.get(name), float) and value.is_integer() and abs(value) < EXACT_BELOW:
                found[name] = int(value)
        yield number, len(line), found


def _csv_rows(text: Iterable[str], schema: CollectionSchema, delimiter: str, place: list[str]) -> _Numbered:
    """The rows; the line of the header goes into `place`."""
    reader = csv.reader(text, strict=True, delimiter=delimiter)
    kinds: Mapping[str, str] = {each.name: each.type for each in schema.fields}
    header: list[str] = []
    try:
        for cells in reader:
            if not header:
                header, place[0] = [name.strip() for name in cells], f"line {reader.line_num}"
                if twice := [name for name in header if header.count(name) > 1]:
                    raise InvalidRows(f"line {reader.line_num}: two columns are called {twice[0]!r}", column=twice[0])
                _check_delimiter(header, delimiter, kinds)
            elif len(cells) == len(header):
                row = {
                    name: None if cell == "" else _converted(name, kinds.get(name, ""), cell, reader.line_num)
                    for name, cell in zip(header, cells, strict=True)
                }
                yield reader.line_num, sum(map(len, cells)), row
            elif cells:
                message = f"line {reader.line_num}: {len(cells)} values under {len(header)} columns"
                raise InvalidRows(message, row=reader.line_num)
    except csv.Error as error:
        raise InvalidRows(f"line {reader.line_num}: {error}", row=reader.line_num) from None


def _check_delimiter(header: list[str], delimiter: str, kinds: Mapping[str, str]) -> None:
    """Raise `InvalidRows` where the names of all columns were taken for one."""
    [name, *others] = header or [""]
    other = next((each for each in (COMMA, ";", "\t", "|") if each != delimiter and each in name), "")
    if other and not others and name not in kinds:
        shown = "'\\t'" if other == "\t" else f"'{other}'"
        raise InvalidRows(f"the header is one column, {name[:50]!r}: give --delimiter {shown}", column=name)


def _of_parquet(file: BinaryIO) -> Iterator[RowBatch]:
    from pyarrow import parquet

    before = 0
    try:
        source: Any = cast(Any, parquet).ParquetFile(file if file.seekable() else io.BytesIO(file.read()))
        for read in source.iter_batches(batch_size=BATCH_ROWS):
            for batch in split_by_bytes(read, BATCH_BYTES):
                yield RowBatch(batch, batch.num_rows, partial(_row_of, before))
                before += batch.num_rows
    except (OSError, pa.ArrowException) as error:
        raise InvalidRows(f"the file is no Parquet that can be read: {error}") from None


def _row_of(before: int, row: int) -> str:
    return f"row {before + row + 1}"


def _converter(kind: str) -> Convert:
    if kind in INTEGER_TYPES:
        return _integer
    if kind in FLOAT_TYPES:
        return float
    return {"bool": _boolean, "timestamp": _time, "float_vector": json.loads}.get(kind, str)


def _converted(name: str, kind: str, text: str, line: int) -> object:
    try:
        return _converter(kind)(text)
    except (ValueError, KeyError, RecursionError):
        wanted = f", but {_WANTED[kind]}" if kind in _WANTED else ""
        message = f"line {line}: column {name!r} cannot be {text[:50]!r}{wanted}"
        raise InvalidRows(message, column=name, row=line) from None


def _integer(text: str) -> int:
    number = int(text.partition(".")[0] if _WHOLE.fullmatch(text) else text)
    if not -(2**63) <= number < 2**63:
        raise ValueError(text)
    return number


def _boolean(text: str) -> bool:
    return _BOOLEANS[text.lower()]


def _time(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
