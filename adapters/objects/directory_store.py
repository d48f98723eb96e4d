"""Objects as the files of a directory, which may be shared by machines: synced, and created in one step."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from ...runtime.errors import JournalFailed, Unavailable

T = TypeVar("T")

UNFINISHED = "unfinished"  # the folder of files that are not linked under their keys yet


class DirectoryStore:
    """`ObjectStore` over a directory. A file is written and synced under another name, then linked under its key, which
    fails where one is there, and its folder is synced. The file system must have hard links.

    After a sync that failed nothing is known of what the kernel still has to write, so nothing more is written until
    the store is opened anew: `create` raises `JournalFailed`."""

    def __init__(self, directory: str) -> None:
        """`directory` need not exist: the first object makes it."""
        self._directory = Path(directory)
        self._failed: JournalFailed | None = None
        self._synced_folders: set[Path] = set()

    async def create(self, key: str, body: bytes) -> bool:
        return await self._call(key, self._create, key, body)

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        return await self._call(key, self._get, key, start, end)

    async def modified(self, key: str) -> int | None:
        return await self._call(key, self._modified, key)

    async def delete(self, key: str) -> None:
        await self._call(key, self._delete, key)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        for key in await self._call(prefix, lambda: list(self._list(prefix))):
            yield key

    async def close(self) -> None:
        pass

    async def _call(self, key: str, call: Callable[..., T], *arguments: object) -> T:
        try:
            return await asyncio.to_thread(call, *arguments)
        except OSError as error:
            raise Unavailable(f"{self._directory / key}: {error.strerror or error}", outcome_unknown=True) from error

    def _create(self, key: str, body: bytes) -> bool:
        unfinished, path = self._write(body), self._directory / key
        try:
            self._make_folder(path.parent)
            os.link(unfinished, path)
            created = True
        except FileExistsError:
            created = False
        finally:
            unfinished.unlink()
        self._sync(path.parent)  # also where it is there: its creator may not have got to that
        return created

    def _get(self, key: str, start: int, end: int | None) -> bytes | None:
        try:
            with (self._directory / key).open("rb") as file:
                file.seek(start)
                return file.read(-1 if end is None else end - start)
        except FileNotFoundError:
            return None

    def _modified(self, key: str) -> int | None:
        try:
            return (self._directory / key).stat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return None

    def _delete(self, key: str) -> None:
        (self._directory / key).unlink(missing_ok=True)

    def _list(self, prefix: str) -> Iterator[str]:
        for path in (self._directory / prefix).rglob("*"):
            if path.is_file():
                yield path.relative_to(self._directory).as_posix()

    def _write(self, body: bytes) -> Path:
        """A new file with the body, synced."""
        if self._failed is not None:
            raise self._failed
        folder = self._directory / UNFINISHED
        self._make_folder(folder)
        path = folder / uuid4().hex
        try:
            with path.open("xb") as file:
                file.write(body)
                file.flush()
                self._fsync(file.fileno(), path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def _make_folder(self, folder: Path) -> None:
        """Make the folder and those above it, each synced into the one above."""
        if folder in self._synced_folders:
            return
        for each in (*reversed(folder.parents), folder):
            if not each.is_dir():
                each.mkdir(exist_ok=True)
        for each in (folder, *folder.parents):
            if each == self._directory.parent:
                break
            self._sync(each.parent)
        self._synced_folders.add(folder)

    def _sync(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            self._fsync(descriptor, folder)
        finally:
            os.close(descriptor)

    def _fsync(self, descriptor: int, path: Path) -> None:
        """Sync, once: the kernel may forget what it failed to write, so a second sync that succeeds proves nothing."""
        try:
            os.fsync(descriptor)
        except OSError as error:
            self._failed = JournalFailed(f"{path} could not be synced: {error.strerror}; open the log anew")
            raise self._failed from error
