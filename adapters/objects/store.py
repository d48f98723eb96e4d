"""What the log needs of an object store: objects that are created once, whole, and never changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol


class ObjectStore(Protocol):
    """A store of objects under keys, which are relative paths with `/`.

    `create` is atomic: of any number of requests that create one key, the body of one becomes the object, whole. What
    was created is seen by every `get` that begins afterwards. All coroutines raise `Unavailable` where the store does
    not answer or refuses, so a request that raised it may have been carried out, or may be yet.
    """

    async def create(self, key: str, body: bytes) -> bool:
        """Create the object. True: this request did, durably. False: the store says that there is one already. It may
        be this very request, sent twice on its way, and some stores say so where they have stored nothing: only `get`
        tells."""
        ...

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        """The bytes from `start` to `end` (exclusive; None: to the last) of the object, fewer where it ends before;
        None where there is none. `start` lies within the object."""
        ...

    async def modified(self, key: str) -> int | None:
        """When the object was put, in ms since 1970 by the store's clock; None where there is none."""
        ...

    async def delete(self, key: str) -> None:
        """Delete the object. A missing one is fine."""
        ...

    def list(self, prefix: str) -> AsyncIterator[str]:
        """The keys that begin with `prefix`, a whole number of their folders with a `/` behind, in any order. It costs
        most of all requests."""
        ...

    async def close(self) -> None:
        """Release what is held. Requests that run end as they would."""
        ...
