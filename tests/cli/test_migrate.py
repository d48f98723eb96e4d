"""`tidewal migrate` between directories: what it says and refuses, and processes of it that are killed."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tidewal.adapters.rocksmq import RocksMQ
from tidewal.cli import migrate as cli_migrate
from tidewal.cli.owned_log import owned_log
from tidewal.runtime.errors import Moved, Unavailable
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy, FromId
from tidewal.runtime.migration.migration import MigrationProof, migrate
from tidewal.runtime.streams.messages import Position

CHANNELS = ("invoices", "orders", "payments")
ENTRIES = 3_000
LATER_S = 0.03


async def fill(directory: Path, size: int) -> list[bytes]:
    """The ids of the entries of each channel, which are the same."""
    ids: list[bytes] = []
    async with await open_wal(f"rocksmq://{directory}") as wal:
        for name in CHANNELS:
            await wal.create_channel(name, ChannelPolicy(retention_s=None))
            ids = await wal.append_many([Append(name, b"%d" % n * size, n + 1) for n in range(ENTRIES)])
        await wal.seek_group("workers", "orders", FromId(ids[99]))
    return ids


def content(directory: Path) -> dict[str, Any]:
    async def read() -> dict[str, Any]:
        found: dict[str, Any] = {}
        async with await open_wal(f"rocksmq://{directory}") as wal:
            for name in CHANNELS:
                entries: list[tuple[int, bytes]] = []
                async for batch in wal.read(name, FromId((await wal.describe(name)).first_id or b"", inclusive=True)):
                    entries += [(each.timestamp, bytes(each.payload)) for each in batch]
                    if len(entries) == ENTRIES:
                        break
                found[name] = entries
            found["groups"] = await wal.groups()
        return found

    return asyncio.run(read())


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return tmp_path / "old"


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return tmp_path / "new"


def test_a_log_goes_to_another_directory(command: Callable[..., Any], old: Path, new: Path) -> None:
    ids = asyncio.run(fill(old, 1))
    before = content(old)
    assert command("migrate", f"rocksmq://{old}", "--status").out == "open\n"
    ended = command("migrate", f"rocksmq://{old}", "--to", f"rocksmq://{new}")
    assert ended.status == 0, ended.err
    assert ended.out.splitlines()[-1] == "3 channels and 1 groups"
    assert content(new) == before
    with pytest.raises(Moved, match=f"rocksmq://{new}"):
        asyncio.run(fill(old, 1))
    shown = json.loads(command("migrate", f"rocksmq://{old}", "--status", "--json").out)
    assert (shown["phase"], shown["other"]) == ("migrated", f"rocksmq://{new}")
    assert shown["channels"]["orders"]["entries"] == ENTRIES
    saved = Position("orders", ids[7], 0, 0, 8, "rocksmq").to_bytes().hex()
    ended = command("migrate", f"rocksmq://{old}", "--to", f"rocksmq://{new}", "--position", saved)
    assert Position.from_bytes(bytes.fromhex(ended.out)).message_id == ids[7], ended.err
    assert command("tail", f"rocksmq://{old}", "orders", "--no-follow").status == 0  # it can still be looked at


def test_both_logs_are_named_from_the_root_on(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, old: Path, new: Path
) -> None:
    asyncio.run(fill(old, 1))
    monkeypatch.chdir(old.parent)
    assert command("migrate", "rocksmq://./old", "--to", "rocksmq://./new").status == 0
    (old.parent / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    with pytest.raises(Moved) as raised:
        asyncio.run(fill(old, 1))
    assert raised.value.url == f"rocksmq://{new}"
    assert command("migrate", f"rocksmq://{old}", "--to", f"rocksmq://{new}/").status == 0
    ended = command("migrate", f"rocksmq://{old}", "--to", "rocksmq://./new")
    assert "migrates to" in ended.err


def test_what_is_refused_makes_no_log(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, old: Path, new: Path, tmp_path: Path
) -> None:
    asyncio.run(fill(old, 1))
    monkeypatch.chdir(tmp_path)
    ended = command("migrate", "file://./odl", "--to", f"rocksmq://{new}")
    assert ended.status == 2
    assert f"no log at file://{tmp_path}/odl" in ended.err
    assert "under way" in command("migrate", f"rocksmq://{old}", "--cancel", "--to", f"rocksmq://{new}").err
    assert "exclude each other" in command("migrate", f"rocksmq://{old}", "--cancel", "--status").err
    assert command("migrate", f"rocksmq://{old}", "--to", "file://./new").status == 0
    for option in ((), ("--cancel",)):
        ended = command("migrate", f"rocksmq://{old}", "--to", f"rocksmq://{tmp_path}/typo", *option)
        assert f"this log migrates to file://{new}: " in ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_no_program_opens_a_log_through_its_migration(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, old: Path, new: Path
) -> None:
    async def opens_both(*logs: Any, **options: Any) -> MigrationProof:
        for directory in (old, new):
            with pytest.raises(Unavailable, match="no owner"):
                await open_wal(f"rocksmq://{directory}", failover_s=0.05)
        return await migrate(*logs, **options)

    asyncio.run(fill(old, 1))
    monkeypatch.setattr(cli_migrate, "migrate_log", opens_both)
    ended = command("migrate", f"rocksmq://{old}", "--to", f"rocksmq://{new}")
    assert ended.status == 0, ended.err


def test_a_log_that_a_program_has_open_is_left_alone(command: Callable[..., Any], old: Path, new: Path) -> None:
    asyncio.run(fill(old, 1))

    for used in (old, new):
        with asyncio.Runner() as program:
            store = program.run(RocksMQ.open(str(used)))
            ended = command("migrate", f"rocksmq://{old}", "--to", f"rocksmq://{new}")
            program.run(store.close())
        assert ended.status == 2
        assert f"a process has rocksmq://{used} open: stop it" in ended.err
    assert command("migrate", f"rocksmq://{old}", "--status").out == "open\n"


async def test_no_program_writes_through_the_process_that_migrates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the cluster's secret those that use a log on object storage are linked to its owner."""
    monkeypatch.setenv("TIDEWAL__CLUSTER__SECRET", "s" * 32)
    async with owned_log(f"file://{tmp_path}/log", create=True) as wal:
        assert not wal.capabilities.multi_process_write


def test_what_is_taken_back_leaves_nothing(command: Callable[..., Any], old: Path, new: Path) -> None:
    asyncio.run(fill(old, 1))
    both = (f"rocksmq://{old}", "--to", f"rocksmq://{new}")
    assert "no migration of this log is under way" in command("migrate", *both, "--cancel").err
    assert "--to is missing" in command("migrate", f"rocksmq://{old}").err

    async def with_ids() -> None:
        async with await open_wal(f"rocksmq://{old}") as wal:
            await wal.create_channel("z-ids", ChannelPolicy())
            await wal.append("z-ids", encode(Record(RecordType.GROUP)))

    asyncio.run(with_ids())
    assert "z-ids has a record GROUP" in command("migrate", *both).err
    for directory in (old, new):
        with pytest.raises(Unavailable, match="has not ended"):
            content(directory)
    assert command("migrate", *both, "--cancel").out == f"taken back: rocksmq://{old} is in use again\n"
    assert len(content(old)["orders"]) == ENTRIES

    async def channels() -> list[str]:
        async with await open_wal(f"rocksmq://{new}") as wal:
            return await wal.channels()

    assert asyncio.run(channels()) == []


@pytest.mark.slow
@pytest.mark.long
def test_processes_that_are_killed_lose_and_double_nothing(
    command: Callable[..., Any], start: Callable[..., Any], old: Path, new: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    asyncio.run(fill(old, 500))
    before = content(old)
    for step in range(1, 2 * len(CHANNELS) + 1):  # each time at the next line that it says, and a moment later
        process = start("migrate", f"rocksmq://{old}", "--to", f"rocksmq://{new}")
        for _ in range(step):
            assert process.stdout.readline().startswith(("copying ", *CHANNELS))
        with suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, LATER_S))
        process.send_signal(signal.SIGKILL)
        process.wait()
    ended = command("migrate", f"rocksmq://{old}", "--to", f"rocksmq://{new}")
    assert ended.status == 0, ended.err
    assert content(new) == before
