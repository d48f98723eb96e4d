"""The dotted keys of the settings, found without regard to case."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..errors import ConfigError
from .milvus_keys import IGNORED_MILVUS_KEYS
from .settings import Settings


class Leaf(NamedTuple):
    """A setting that holds a value, or a section of free keys: the key of that ends in `.*`."""

    key: str
    attributes: tuple[str, ...]
    """Where the value is in `Settings`."""
    field: FieldInfo


def _leaves(model: type[BaseModel], prefix: str = "", above: tuple[str, ...] = ()) -> Iterator[Leaf]:
    for name, field in model.model_fields.items():
        key, attributes = f"{prefix}{field.alias or name}", (*above, name)
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _leaves(annotation, f"{key}.", attributes)
        else:
            yield Leaf(f"{key}.*" if isinstance(field.default, dict) else key, attributes, field)


def _letters(name: str) -> str:
    return name.lower().replace(".", "").replace("_", "")


LEAVES = tuple(_leaves(Settings))

FREE_SECTIONS = tuple(leaf.key.removesuffix("*") for leaf in LEAVES if leaf.key.endswith("*"))
"""The beginnings of keys of which each end is taken and handed through as it is."""

_BY_LOWER_CASE = {leaf.key.lower(): leaf.key for leaf in LEAVES if not leaf.key.endswith("*")}

_BY_LETTERS = {_letters(key): key for key in _BY_LOWER_CASE.values()}


def canonical_by_letters(name: str) -> str | None:
    """The setting whose key has the letters of `name`, whatever separates them; None where there is none."""
    return _BY_LETTERS.get(_letters(name))


def free_section(key: str) -> str | None:
    """The member of `FREE_SECTIONS` that `key` begins with."""
    return next((prefix for prefix in FREE_SECTIONS if key.lower().startswith(prefix.lower())), None)


def canonical(key: str) -> str | None:
    """`key` as the settings write it; None for one that they do not have."""
    prefix = free_section(key)
    return prefix + key[len(prefix) :] if prefix else _BY_LOWER_CASE.get(key.lower())


def is_ignored(key: str) -> bool:
    """Whether `key` is one of Milvus' that mean nothing here."""
    lower = key.lower()
    return any(fnmatchcase(lower, pattern.lower()) for pattern in IGNORED_MILVUS_KEYS)


def unknown_key(key: str, source: str = "") -> ConfigError:
    """The error for a key that there is not, with the nearest known one; `source` says where it stands."""
    near = difflib.get_close_matches(key.lower(), _BY_LOWER_CASE, n=1, cutoff=0.0)
    nearest = _BY_LOWER_CASE[near[0]]
    where = f" ({source})" if source else ""
    return ConfigError(
        f"unknown setting {key!r}{where}; the nearest known one is {nearest!r}", key=key, nearest=nearest
    )
