"""In what a collection differs from the one that a client wants to create under its name."""

from __future__ import annotations

from ...runtime.catalog.catalog import Collection
from ...runtime.rows.schema import CollectionSchema, Field


def differences(existing: Collection, wanted: CollectionSchema, shards: int) -> str:
    """What `existing` has and `wanted` in `shards` shards has not, and the other way round; "" where both are the
    same."""
    has, wants = existing.schema, wanted
    changed = [
        f"{_shown(ours)}, not {_shown(theirs)}"
        for theirs in wants.fields
        if (ours := has.find(theirs.name)) is not None and ours != theirs
    ]
    missing = [_shown(each) for each in wants.fields if has.find(each.name) is None]
    besides = [_shown(each) for each in has.fields if wants.find(each.name) is None]
    found = [f"it has {each}" for each in changed]
    found += [f"it has no {', '.join(missing)}"] * bool(missing)
    found += [f"it has {', '.join(besides)} besides"] * bool(besides)
    found += [f"its key is {has.primary_key}, not {wants.primary_key}"] * (has.primary_key != wants.primary_key)
    found += [f"it has {existing.shards} shards, not {shards}"] * (existing.shards != shards)
    if not found and has != wants:
        found = [
            "its fields are in another order" if has.version == wants.version else "its schema has another version"
        ]
    return "; ".join(found)


def _shown(field: Field) -> str:
    return f"{field.name}:{field.type}{'?' if field.nullable else ''}{f':{field.dim}' if field.dim else ''}"
