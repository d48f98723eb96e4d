"""The file of a log: channels, entries and holds in three tables. One thread at a time calls a `Database`."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote

from tidewal import Append, ChannelPolicy, From, FromId, FromTime, errors
from tidewal.adapters import (
    ChannelInfo,
    Entry,
    Start,
    check_name,
    check_size,
    decode_policy,
    encode_policy,
    not_found,
    other_policy,
)

READ_BYTES = 1024 * 1024  # what one call reads at most, and one entry more
LARGEST = 2**63 - 1  # of an id

# AUTOINCREMENT: an id is never given out again, whatever was removed. `removed` is the last id that was.
SCHEMA = """
PRAGMA journal_mode = TRUNCATE;
PRAGMA synchronous = FULL;
PRAGMA foreign_keys = ON;
CREATE TABLE IF NOT EXISTS channels (
    number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, policy TEXT NOT NULL,
    removed INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT, channel INTEGER NOT NULL REFERENCES channels ON DELETE CASCADE,
    timestamp INTEGER NOT NULL, payload BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS entries_of_channel ON entries (channel, id);
CREATE TABLE IF NOT EXISTS holds (
    channel INTEGER NOT NULL REFERENCES channels ON DELETE CASCADE, holder TEXT NOT NULL, id INTEGER NOT NULL,
    PRIMARY KEY (channel, holder)
);
"""
CHANNEL = """
SELECT number, name, policy, removed, coalesce((SELECT max(id) FROM entries WHERE channel = number), removed)
FROM channels WHERE name = ?
"""


class Channel(NamedTuple):
    """A row of `channels`, and its last id. The number is another one when a channel of the name is made again."""

    number: int
    name: str
    policy: ChannelPolicy
    removed: int
    latest: int


class Database:
    """An open file. Its calls raise `sqlite3.Error`, and the errors of `Wal`."""

    def __init__(self, path: str, *, read_only: bool, busy_timeout_s: float) -> None:
        """Open the file, or make it unless `read_only`. A call waits for other processes for `busy_timeout_s`."""
        uri = f"file:{quote(path)}?mode={'ro' if read_only else 'rwc'}"
        self._sql = sqlite3.connect(
            uri, uri=True, timeout=busy_timeout_s, isolation_level="IMMEDIATE", check_same_thread=False
        )
        if not read_only:
            self._sql.executescript(SCHEMA)
        self.channels()  # an error where the file is no log

    def close(self) -> None:
        self._sql.close()

    def _number(self, query: str, *arguments: object) -> int:
        """The first column of the first row; 0 where there is none, or nothing in it."""
        row = self._sql.execute(query, arguments).fetchone()
        return 0 if row is None or row[0] is None else row[0]

    def create(self, name: str, policy: ChannelPolicy) -> None:
        check_name("channel name", name)
        with self._sql:
            wire = json.dumps(encode_policy(policy))
            self._sql.execute("INSERT INTO channels (name, policy) VALUES (?, ?) ON CONFLICT DO NOTHING", (name, wire))
        if self._channel(name).policy != policy:
            raise other_policy(name)

    def channels(self) -> list[str]:
        return [name for (name,) in self._sql.execute("SELECT name FROM channels ORDER BY name")]

    def describe(self, name: str) -> ChannelInfo:
        channel = self._channel(name)
        return ChannelInfo(name, channel.policy, self._first(channel), id_of(channel.latest))

    def drop(self, name: str) -> None:
        with self._sql:
            self._sql.execute("DELETE FROM channels WHERE name = ?", (name,))

    def _channel(self, name: str) -> Channel:
        row = self._sql.execute(CHANNEL, (name,)).fetchone()
        if row is None:
            raise not_found(name)
        return Channel(*row)._replace(policy=decode_policy(json.loads(row[2])))

    def _first(self, channel: Channel) -> bytes | None:
        return id_of(self._number("SELECT min(id) FROM entries WHERE channel = ?", channel.number))

    def append(self, submits: Iterable[Sequence[Append]]) -> list[list[bytes] | errors.TidewalError]:
        """Append in one commit; for each submit the ids, or why nothing of it was appended."""
        with self._sql:
            self._sql.execute("BEGIN IMMEDIATE")
            return [self._append(entries) for entries in submits]

    def _append(self, entries: Sequence[Append]) -> list[bytes] | errors.TidewalError:
        try:
            channels = {name: self._channel(name) for name in {entry.channel for entry in entries}}
            for entry in entries:
                check_size(entry.channel, len(entry.payload), channels[entry.channel].policy.max_message_bytes)
        except errors.TidewalError as error:
            return error
        insert = "INSERT INTO entries (channel, timestamp, payload) VALUES (?, ?, ?)"
        rows = [(channels[entry.channel].number, entry.timestamp, entry.payload) for entry in entries]
        return [(self._sql.execute(insert, row).lastrowid or 0).to_bytes(8, "big") for row in rows]

    def start(self, name: str, start: Start) -> tuple[int, int]:
        """The number of a channel, and the id behind which a reader begins."""
        channel = self._channel(name)
        match start:
            case From.EARLIEST:
                return channel.number, channel.removed
            case From.LATEST:
                return channel.number, channel.latest
            case FromTime(timestamp):
                return channel.number, (self._at(channel, timestamp) or channel.latest + 1) - 1
            case FromId(id, inclusive):
                number = min(int.from_bytes(id, "big"), LARGEST)
                there = self._number("SELECT id FROM entries WHERE id = ? AND channel = ?", number, channel.number)
                if len(id) != 8 or not (there or (number == channel.removed > 0 and not inclusive)):
                    raise self._lost(channel, id)
                return channel.number, number - inclusive

    def read(self, name: str, number: int, behind: int) -> list[Entry]:
        """The next entries of a channel behind an id; empty while there are none."""
        entries: list[Entry] = []
        size = 0
        query = "SELECT id, timestamp, payload FROM entries WHERE channel = ? AND id > ? ORDER BY id"
        for id, timestamp, payload in self._sql.execute(query, (number, behind)):
            entries.append(Entry(id.to_bytes(8, "big"), timestamp, payload))
            size += len(payload)
            if size > READ_BYTES:
                break
        channel = self._channel(name)  # looked at last, so that what was removed meanwhile is noticed
        if channel.number != number:
            raise errors.ChannelNotFound(f"channel {name} was dropped", channel=name)
        if behind < channel.removed and not channel.policy.ephemeral:
            raise self._lost(channel, behind.to_bytes(8, "big"))
        return entries

    def _lost(self, channel: Channel, id: bytes) -> errors.PositionLost:
        text = f"channel {channel.name} does not go on at {id.hex()}: it was removed, or never there"
        return errors.PositionLost(text, requested=id, first_available=self._first(channel), channel=channel.name)

    def id_at(self, name: str, timestamp: int) -> bytes | None:
        return id_of(self._at(self._channel(name), timestamp))

    def _at(self, channel: Channel, timestamp: int) -> int:
        query = "SELECT id FROM entries WHERE channel = ? AND timestamp >= ? ORDER BY id LIMIT 1"
        return self._number(query, channel.number, timestamp)

    def truncate(self, name: str, id: bytes) -> None:
        with self._sql:
            self._sql.execute("BEGIN IMMEDIATE")
            number = self._channel(name).number
            held = self._number("SELECT min(id) FROM holds WHERE channel = ?", number)
            end = min(int.from_bytes(id, "big"), held or LARGEST)
            last = self._number("SELECT max(id) FROM entries WHERE channel = ? AND id < ?", number, end)
            self._sql.execute("DELETE FROM entries WHERE channel = ? AND id <= ?", (number, last))
            self._sql.execute("UPDATE channels SET removed = max(removed, ?) WHERE number = ?", (last, number))

    def hold(self, name: str, holder: str, id: bytes | None) -> None:
        number = self._channel(name).number
        with self._sql:
            self._sql.execute("DELETE FROM holds WHERE channel = ? AND holder = ?", (number, holder))
            if id is not None:
                self._sql.execute("INSERT INTO holds VALUES (?, ?, ?)", (number, holder, int.from_bytes(id, "big")))


def id_of(number: int) -> bytes | None:
    """The message id of a row; None for 0, which no row has."""
    return number.to_bytes(8, "big") if number else None
