"""A log that follows another to which it was migrated: what its calls do before, meanwhile and behind."""

from __future__ import annotations

import asyncio

import pytest

from tidewal.runtime.errors import ChannelNotFound, Closed, ConfigError, Moved, TidewalError, Unavailable
from tidewal.runtime.log.following import FollowingWal, moves_of
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, OnAppended, Wal
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal


class MovedWal(MemoryWal):
    """A log whose owner says that it was migrated, once `moved` is set."""

    moved = False

    def _check_open(self) -> None:
        super()._check_open()
        if self.moved:
            raise Moved("memory://old was migrated to memory://new", url="memory://new")


async def logs() -> tuple[MovedWal, MemoryWal]:
    old, new = MovedWal(MemoryLog()), MemoryWal(MemoryLog())
    for wal in (old, new):
        await wal.create_channel("c", ChannelPolicy())
    return old, new


def ignore(_: list[bytes] | TidewalError) -> None:
    pass


async def test_calls_are_repeated_in_the_next_log_and_readers_end() -> None:
    old, new = await logs()
    asked: list[str] = []

    async def follow(moved: Moved) -> Wal:
        asked.append(moved.url or "")
        return new

    wal = FollowingWal(old, follow)
    await wal.append("c", b"before")
    reader = aiter(wal.read("c", From.EARLIEST))
    assert [entry.payload for entry in await anext(reader)] == [b"before"]
    old.moved = True
    ids = await asyncio.gather(wal.append("c", b"1"), wal.append("c", b"2"))
    assert sorted(ids) == [b"\0" * 7 + b"\1", b"\0" * 7 + b"\2"]
    assert (asked, moves_of(wal), moves_of(new)) == (["memory://new"], 1, 0)
    with pytest.raises(ChannelNotFound):  # the old log is closed
        await anext(reader)
    await wal.close()
    with pytest.raises(Closed):
        await new.append("c", b"closed with it")


async def test_a_submit_that_meets_the_move_may_be_repeated_and_begins_it() -> None:
    old, new = await logs()

    async def follow(_: Moved) -> Wal:
        return new

    wal = FollowingWal(old, follow)
    old.moved = True
    with pytest.raises(Unavailable) as refused:
        wal.submit([Append("c", b"1")], ignore)
    assert refused.value.retryable
    assert refused.value.fields["outcome_unknown"]
    for _ in range(10):
        await asyncio.sleep(0)
    wal.submit([Append("c", b"2")], ignore)
    assert [entry.payload for entry in new.log.channels["c"].entries] == [b"2"]


async def test_a_log_that_cannot_be_opened_here_is_said_to_be_missing_and_tried_again() -> None:
    old, new = await logs()
    errors: list[TidewalError] = [
        ConfigError("no password", key="kafka.password"),
        Unavailable("no broker answers"),
    ]

    async def follow(_: Moved) -> Wal:
        if errors:
            raise errors.pop(0)
        return new

    wal = FollowingWal(old, follow)
    old.moved = True
    with pytest.raises(Moved, match=r"cannot be opened here \(no password\)") as moved:
        await wal.channels()
    assert moved.value.url == "memory://new"
    with pytest.raises(Unavailable, match="does not answer yet: no broker answers"):
        await wal.channels()
    assert await wal.channels() == ["c"]


async def test_calls_wait_between_two_logs_and_a_submit_is_refused() -> None:
    old, new = await logs()
    wal = FollowingWal(old)
    reading = asyncio.create_task(anext(aiter(wal.read("c", From.LATEST))))
    await asyncio.sleep(0)
    wal.leave()
    waiting = asyncio.create_task(wal.append("c", b"1"))
    await old.close()
    with pytest.raises(ChannelNotFound):
        await reading
    with pytest.raises(Unavailable, match="repeat it"):
        wal.submit([Append("c", b"2")], ignore)
    assert not waiting.done()
    wal.arrive(new)
    await waiting
    assert [entry.payload for entry in new.log.channels["c"].entries] == [b"1"]
    await wal.close()  # the log that it was told of is another's
    await new.append("c", b"3")


class LateWal(MemoryWal):
    """A log that is closed before it has said what became of an append."""

    def submit(self, entries: list[Append], done: OnAppended) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.done = done


async def test_an_append_that_the_old_log_did_not_answer_is_of_unknown_outcome() -> None:
    old = LateWal(MemoryLog())
    wal = FollowingWal(old)
    told: list[list[bytes] | TidewalError] = []
    wal.submit([Append("c", b"1")], told.append)
    wal.leave()
    old.done(Closed("the log is closed", outcome_unknown=True))
    [error] = told
    assert isinstance(error, Unavailable)
    assert error.fields["outcome_unknown"]
