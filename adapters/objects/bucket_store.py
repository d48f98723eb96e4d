"""Objects in a bucket: S3 and what speaks its protocol, Google's and Azure's, by the library `obstore`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from ...runtime.errors import Unavailable
from ...runtime.tables.object_options import shown_failure

if TYPE_CHECKING:
    from obstore.store import ObjectStore as ClientStore

REQUEST_TIMEOUT_S = 10
LIST_KEYS = 1000


class BucketStore:
    """`ObjectStore` over a bucket. Credentials come from where the store's other tools have them: the environment, and
    the machine's role; the library renews those that expire.

    Creating is not repeated in here: the second request of the library would find the object of the first and say
    `False`."""

    def __init__(self, url: str, config: Mapping[str, Any]) -> None:
        """`url` is `s3://bucket/prefix` or one of its kind, `config` are options of the library for it. Raises
        `ValueError` and the library's errors for what names no bucket."""
        plain = str(config.get("endpoint", "")).startswith("http://")
        client = {"timeout": timedelta(seconds=REQUEST_TIMEOUT_S), "allow_http": plain}
        options: dict[str, Any] = {"client_options": client, "config": dict(config)}
        retry_timeout = timedelta(seconds=REQUEST_TIMEOUT_S)
        retrying: dict[str, Any] = {"retry_config": {"max_retries": 3, "retry_timeout": retry_timeout}}
        once: dict[str, Any] = {"retry_config": {"max_retries": 0, "retry_timeout": retry_timeout}}
        self._store: ClientStore = from_url(url, **options, **retrying)
        self._creating: ClientStore = from_url(url, **options, **once)

    async def create(self, key: str, body: bytes) -> bool:
        try:
            await self._creating.put_async(key, body, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        except BaseError as error:
            raise unavailable(key, error) from error
        return True

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        try:
            if start or end is not None:
                part: Any = {"offset": start} if end is None else (start, end)
                found = await self._store.get_async(key, options={"range": part})
            else:
                found = await self._store.get_async(key)
            return bytes(await found.bytes_async())
        except FileNotFoundError:
            return None
        except BaseError as error:
            raise unavailable(key, error) from error

    async def modified(self, key: str) -> int | None:
        try:
            found = await self._store.head_async(key)
        except FileNotFoundError:
            return None
        except BaseError as error:
            raise unavailable(key, error) from error
        return int(found["last_modified"].timestamp() * 1000)

    async def delete(self, key: str) -> None:
        try:
            await self._store.delete_async(key)
        except FileNotFoundError:
            pass
        except BaseError as error:
            raise unavailable(key, error) from error

    async def list(self, prefix: str) -> AsyncIterator[str]:
        try:
            async for found in self._store.list(prefix, chunk_size=LIST_KEYS):
                for each in found:
                    yield each["path"]
        except BaseError as error:
            raise unavailable(prefix, error) from error

    async def close(self) -> None:
        pass


def unavailable(key: str, error: Exception) -> Unavailable:
    """The error for a request that the store did not answer, or refused."""
    return Unavailable(f"{key}: {shown_failure(error)}", outcome_unknown=True)
