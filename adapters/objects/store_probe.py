"""Try whether a store creates objects atomically, without which two processes would overwrite each other's blocks."""

from __future__ import annotations

import asyncio
from typing import Final
from uuid import uuid4

from ...runtime.errors import Unsupported
from .store import ObjectStore

FOLDER: Final = "probe/"
KEYS: Final = 8
RACERS: Final = 16


async def probe(store: ObjectStore) -> None:
    """Let requests race for some keys, then create each once more, and delete what was created. A store that passes may
    still fail: where several gateways lead to it, one was tried. Raises `Unavailable`, and `Unsupported` where a key
    has two winners, or an object that is not the winner's."""
    keys = [f"{FOLDER}{uuid4().hex}" for _ in range(KEYS)]
    for key in keys:
        bodies = [uuid4().bytes * 64 for _ in range(RACERS)]
        created = await asyncio.gather(*(store.create(key, body) for body in bodies))
        winners = [body for body, result in zip(bodies, created, strict=True) if result]
        winners += [b"late"] * await store.create(key, b"late")
        stored = await store.get(key)
        if winners != [stored]:
            raise Unsupported(
                "the store does not create objects atomically (If-None-Match: *): of requests that create one at once, "
                "not exactly one succeeds; a log there would lose entries",
                capability="atomic create",
            )
    for key in keys:
        await store.delete(key)
