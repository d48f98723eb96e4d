"""`tidewal create`: make a collection from fields, or from a file that has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from ..runtime.errors import InvalidSchema
from ..runtime.log.names import DEFAULT_PREFIX
from ..runtime.rows.schema import FIELD_TYPES, CollectionSchema, Field, FieldType
from .collections import described_schema, shown_field
from .connect import CollectionName, over_client
from .logging_setup import logged
from .open_log import NodeUrl, Prefix
from .results import AsJson

NONE: list[str] = []

OTHER_NAMES: dict[str, FieldType] = {
    **dict.fromkeys(("string", "str", "text", "char", "utf8"), "varchar"),
    **dict.fromkeys(("date", "datetime", "timestamptz", "time"), "timestamp"),
    **dict.fromkeys(("integer", "int", "long", "bigint"), "int64"),
    **dict.fromkeys(("smallint", "short", "uint8"), "int16"),
    "uint16": "int32",
    **dict.fromkeys(("uint32", "uint64"), "int64"),
    **dict.fromkeys(("tinyint", "byte"), "int8"),
    **dict.fromkeys(("real", "float32"), "float"),
    **dict.fromkeys(("float64", "number", "numeric", "decimal"), "double"),
    **dict.fromkeys(("vector", "floatvector", "embedding"), "float_vector"),
    "boolean": "bool",
}
"""What databases and languages call the types."""


@logged
def create(
    url: NodeUrl,
    collection: CollectionName,
    field: Annotated[
        list[str], typer.Option(metavar="NAME:TYPE[:DIM]", help="A field; name:type? may be null. Once for each.")
    ] = NONE,
    primary_key: Annotated[str, typer.Option(help="The field that is the primary key: int64 or varchar.")] = "",
    schema: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The fields: a YAML, JSON or Parquet file, instead of --field."),
    ] = None,
    shards: Annotated[int, typer.Option(min=1, help="Shards, which are written and read side by side.")] = 2,
    replicas: Annotated[
        int | None, typer.Option(min=0, help="QueryNodes that get it into memory; 0: it is to be loaded first.")
    ] = None,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Create a collection; where it is there already with the same fields and shards, say so and succeed.

    The types are bool, int8, int16, int32, int64, float, double, varchar, timestamp and float_vector:DIM. A file of
    YAML or JSON has the keys `primary_key` and `fields`, a list of `name`, `type`, `nullable` and `dim`; of a Parquet
    file the columns are taken.
    """
    wanted = _schema(collection, field, primary_key, schema)
    made = over_client(url, prefix, lambda client: client.create_collection(wanted, shards=shards, replicas=replicas))
    described = described_schema(made)
    if as_json:
        typer.echo(json.dumps(described))
        return
    fields = ", ".join(map(shown_field, described["fields"]))
    typer.echo(f"{made.name} is there: {described['shards']} shards, key {made.schema.primary_key}, {fields}")


def _schema(name: str, fields: Sequence[str], primary_key: str, file: Path | None) -> CollectionSchema:
    """The schema that the options mean. Raises `InvalidSchema`."""
    if bool(fields) == bool(file):
        raise InvalidSchema("give the fields with --field name:type, or in a file with --schema")
    if file is not None:
        return _from_file(name, file, primary_key)
    if not primary_key:
        raise InvalidSchema("say with --primary-key which field is the key")
    return CollectionSchema(name, tuple(map(_field, fields)), primary_key)


def _field(text: str) -> Field:
    name, *rest = text.split(":")
    if not 1 <= len(rest) <= 2:
        raise InvalidSchema(f"--field {text}: write name:type, or name:float_vector:dim")
    kind, nullable = rest[0].removesuffix("?"), rest[0].endswith("?")
    if len(rest) == 2 and not rest[1].isdecimal():
        raise InvalidSchema(f"--field {text}: {rest[1]!r} is no number of dimensions")
    return _checked(name, kind, nullable, int(rest[1]) if len(rest) == 2 else None)


def _checked(name: str, kind: str, nullable: bool, dim: int | None) -> Field:
    if kind not in FIELD_TYPES:
        near = OTHER_NAMES.get(kind.lower()) or (get_close_matches(kind, sorted(FIELD_TYPES), n=1) or [""])[0]
        hint = f"the nearest known one is {near!r}" if near else f"known are {', '.join(sorted(FIELD_TYPES))}"
        raise InvalidSchema(f"field {name!r} has unknown type {kind!r}; {hint}")
    return Field(name, cast(FieldType, kind), nullable, dim)


def _from_file(name: str, file: Path, primary_key: str) -> CollectionSchema:
    if file.suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        try:
            return CollectionSchema.from_arrow(name, cast(Any, parquet).read_schema(file), primary_key)
        except (OSError, pa.ArrowException) as error:
            raise InvalidSchema(f"{file}: {error}") from None
    import yaml

    try:
        found: Any = yaml.safe_load(file.read_text())
        fields = tuple(_field_of(each) for each in found["fields"])
        return CollectionSchema(name, fields, primary_key or str(found["primary_key"]))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidSchema(f"{file}: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise InvalidSchema(f"{file}: needs primary_key, and fields, a list of name, type, nullable and dim") from None


def _field_of(each: Mapping[str, Any]) -> Field:
    unknown = set(each) - {"name", "type", "nullable", "dim"}
    if unknown:
        raise InvalidSchema(f"a field has name, type, nullable and dim, not {sorted(map(str, unknown))[0]!r}")
    return _checked(str(each["name"]), str(each["type"]), bool(each.get("nullable", False)), each.get("dim"))
