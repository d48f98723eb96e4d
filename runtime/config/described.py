"""Settings as people look at them: each with its value, where that comes from, its default, type and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from ..errors import ConfigError
from ..log.redaction import HIDDEN, shown_url
from .keys import LEAVES, canonical, free_section, is_ignored, unknown_key
from .loading import GivenValue, given_values, settings_of

_TYPES: dict[object, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    SecretStr: "text, secret",
    tuple[str, ...]: "list of texts",
    dict[str, str]: "texts by key",
}
_BOUNDS = (("gt", ">"), ("ge", "≥"), ("le", "≤"))


@dataclass(frozen=True, slots=True)
class DescribedSetting:
    """One setting, as JSON has it. Secrets are hidden: in `value` and `default` stands `***` for them."""

    key: str
    value: object
    source: str
    """The file, `environment variable NAME`, `arguments` or `default`."""
    default: object
    type: str
    meaning: str


def described_settings(
    path: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> list[DescribedSetting]:
    """All settings as `load_settings` fills them from the same sources. Raises what that raises."""
    given = given_values(path, environment=environment, arguments=arguments)
    settings = settings_of(given)
    return [
        DescribedSetting(
            leaf.key,
            _shown(leaf.field, reduce(getattr, leaf.attributes, settings)),
            _source(leaf.key, given),
            _shown(leaf.field, leaf.field.get_default(call_default_factory=True)),
            _type(leaf.field),
            leaf.field.description or "",
        )
        for leaf in LEAVES
    ]


def canonical_key(key: str) -> str:
    """The `DescribedSetting.key` of the setting that `key` means. Raises `ConfigError`, with the nearest known key."""
    if found := canonical(key):
        section = free_section(found)
        return f"{section}*" if section else found
    if is_ignored(key):
        raise ConfigError(f"{key!r} is a setting of Milvus without a meaning in Tidewal", key=key)
    raise unknown_key(key)


def _source(key: str, given: Mapping[str, GivenValue]) -> str:
    section = free_section(key)
    sources = [each.source for name, each in given.items() if name == key or (section and name.startswith(section))]
    return ", ".join(dict.fromkeys(sources)) or "default"


def _shown(field: FieldInfo, value: object) -> object:
    """`value` as JSON has it. Free keys of a section and URLs may hold credentials."""
    if isinstance(value, SecretStr):
        return HIDDEN if value else ""
    if isinstance(value, dict):
        return dict.fromkeys(cast("dict[str, str]", value), HIDDEN)
    if isinstance(value, tuple):
        return list(cast("tuple[object, ...]", value))
    return value if field.repr else shown_url(str(value))


def _type(field: FieldInfo) -> str:
    kind: Any = field.annotation
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    bounds = [
        f"{sign} {bound:g}"
        for name, sign in _BOUNDS
        for limit in field.metadata
        if (bound := getattr(limit, name, None)) is not None
    ]
    return " ".join([_TYPES.get(kind) or str(kind), *bounds])


def shown_value(value: object) -> str:
    """A value of a `DescribedSetting` as text."""
    if isinstance(value, list):
        return ",".join(map(str, cast("list[object]", value)))
    if isinstance(value, dict):
        return ", ".join(f"{key}={each}" for key, each in cast("dict[str, object]", value).items())
    return str(value)
