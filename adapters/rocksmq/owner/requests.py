"""The owner's answer to each request of the socket protocol, which `adapters/rocksmq/protocol.py` describes."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from ....runtime.errors import InvalidRequest, TidewalError, Unsupported
from ....runtime.filters.subscription import FILTER_LANGUAGE, filter_of
from ....runtime.log.left_out import EntryFilter
from ....runtime.log.policy_codec import decode_policy, encode_policy
from ....runtime.log.wal import Append, ChannelPolicy, Entry, Payload
from ..journal.channels import encode_id
from ..protocol import (
    ANSWER_BYTES,
    APPENDS,
    ROW,
    VERSION,
    WAIT_LIMIT_S,
    ProtocolFrame,
    appends_in,
    decode_start,
    encode,
    encode_entries,
    encode_filtered,
    unpack,
)
from .connection import Connection
from .group_service import GroupService
from .reader import Reader
from .temporary import TemporaryChannels

if TYPE_CHECKING:
    from .store import RocksMQ

FILTERED_BYTES = 8 * 1024 * 1024  # looked at for one answer: others of the connection wait meanwhile
FILTERING_S = 0.002  # at once, and until one entry is done: then the loop has its turn
NUMBERS = 1 << 63  # of appends: below it, and so are the numbers behind the last of a request in what msgpack can hold

_log = logging.getLogger(__name__)


class Requests:
    """Answers requests without waiting at once, the others in tasks of the connection."""

    def __init__(
        self, store: RocksMQ, groups: GroupService | None, boot: int, frame_bytes: int, waiting_requests: int
    ) -> None:
        self._store, self._groups = store, groups
        self._temporary = TemporaryChannels(store)
        self._greeting = {
            "boot": boot,
            "frame_bytes": frame_bytes,
            "filters": FILTER_LANGUAGE,
            "waiting_requests": waiting_requests,
        }

    def handle(self, connection: Connection, frame: ProtocolFrame) -> None:
        """Answer one request. Appends reach the log in the order of these calls."""
        try:
            message = unpack(frame.head)
        except TidewalError as error:
            connection.refuse(0, error)
            return
        if not _is_request(message):
            connection.refuse(0, InvalidRequest("the request does not fit the protocol"))
            return
        seq, method, *arguments = cast("list[Any]", message)
        try:
            self._answer(connection, seq, method, arguments, frame)
        except TidewalError as error:
            connection.fail(seq, error)
        except Exception as error:
            _log.exception("a request to the log failed")
            connection.fail(seq, error)

    def gone(self, connection: Connection) -> None:
        """The connection has ended."""
        if connection.greeted:
            self._temporary.disconnected(connection.number)
            if self._groups is not None:
                self._groups.disconnected(connection.number)

    def _answer(
        self, connection: Connection, seq: int, method: str, arguments: list[object], frame: ProtocolFrame
    ) -> None:
        if not connection.greeted:
            self._greet(connection, seq, method, arguments)
        elif method in ("append", "appends"):
            self._append(connection, seq, method, arguments, frame)
        elif method == "beat" or method.startswith("group."):
            self._ask_groups(connection, seq, method, _with_entries(arguments, frame))
        elif len(frame.rows):
            raise InvalidRequest(f"{method} takes no entries")
        elif method == "cancel":
            connection.cancel(_seq(arguments))
            connection.answer(seq, None)
        elif (work := self._later(connection, seq, method, arguments)) is not None:
            connection.later(seq, work)
        else:
            connection.answer(seq, self._now(method, arguments))

    def _greet(self, connection: Connection, seq: int, method: str, arguments: list[object]) -> None:
        match arguments:
            case _ if method != "hello":
                connection.refuse(seq, InvalidRequest("say hello first"))
            case [int(version), *_] if version != VERSION:
                message = f"this owner speaks version {VERSION} of its protocol, not {version}"
                connection.refuse(seq, Unsupported(message, capability="protocol", found=version, supported=VERSION))
            case [int(), bytes() | None as client, *rest] if client is None or len(client) == 16:
                token = rest[0] if rest else b""
                if connection.secret and not (
                    isinstance(token, bytes) and hmac.compare_digest(token, connection.secret)
                ):
                    connection.refuse(seq, InvalidRequest("the token is not that of this log"))
                    return
                connection.client, connection.greeted = client, True
                self._temporary.connected(connection.number, client)
                if self._groups is not None:
                    self._groups.connected(connection.number, client)
                connection.answer(seq, self._greeting)
            case _:
                connection.refuse(seq, InvalidRequest("hello takes a version, a client id of 16 bytes, and a token"))

    def _append(
        self, connection: Connection, seq: int, method: str, arguments: list[object], frame: ProtocolFrame
    ) -> None:
        client = connection.client
        if not client:
            raise InvalidRequest("a client that appends needs an id")
        if len(arguments) != 3 or type(arguments[2]) is not list:
            raise _unfit(method)
        number, settled, entries = _with_entries(arguments, frame)
        if type(number) is not int or type(settled) is not int:
            raise _unfit(method)
        if not (0 < number < NUMBERS and 0 <= settled < NUMBERS):
            raise _unfit(method)
        appends = cast("list[Append]", entries)
        if method == "append":
            self._store.submit_from(client, number, settled, appends, connection.append(seq, frame.size))
            return
        if not 0 < len(appends) <= APPENDS:
            raise _unfit(method)
        done = connection.append_each(seq, frame.size, len(appends))
        if self._store.submit_each_from(client, number, settled, appends, done):
            return
        connection.forget_append(frame.size, len(appends))
        for place, entry in enumerate(appends):
            size = ROW.size + len(entry.payload)
            self._store.submit_from(client, number + place, settled, [entry], connection.append(seq + place, size))

    def _ask_groups(self, connection: Connection, seq: int, method: str, arguments: list[object]) -> None:
        groups = self._groups
        if groups is None:
            if method == "beat":
                connection.answer(seq, None)
                return
            raise InvalidRequest(f"this owner does not know {method}")
        connection.later(seq, lambda: _packed(seq, groups.answer(connection.number, method, arguments)))

    def _now(self, method: str, arguments: list[object]) -> object:
        match [method, *arguments]:
            case ["latest_id", str(channel)]:
                return self._store.find(channel).latest_id
            case ["stand_down"]:
                return self._store.request_yield()
            case _:
                raise _unfit(method)

    def _later(
        self, connection: Connection, seq: int, method: str, arguments: list[object]
    ) -> Callable[[], Coroutine[object, object, list[Payload] | None]] | None:
        store = self._store
        match [method, *arguments]:
            case ["read", str(channel), list(), bytes() | None as upto, int() | float() as wait_s]:
                fixed = self._fixed(channel, cast("list[object]", arguments[1]))
                return lambda: self._read(connection, seq, channel, fixed, upto, wait_s)
            case ["read", str(channel), list(), None, int() | float() as wait_s, str(text)]:
                fixed, where = self._fixed(channel, cast("list[object]", arguments[1])), filter_of(text)
                assert where is not None
                return lambda: self._read_filtered(connection, seq, channel, fixed, wait_s, EntryFilter(where))
            case ["channels"]:
                return lambda: _packed(seq, store.channels())
            case ["describe", str(channel)]:
                return lambda: _packed(seq, self._describe(channel))
            case ["id_at", str(channel), int(timestamp)]:
                return lambda: _packed(seq, store.id_at(channel, timestamp))
            case ["create", str(channel), dict()]:
                decoded = _policy(cast("dict[str, Any]", arguments[1]))
                if decoded.temporary and connection.client is None:
                    raise InvalidRequest("a client that creates a temporary channel needs an id")
                return lambda: _packed(seq, store.create_channel_for(connection.client, channel, decoded))
            case ["drop", str(channel)]:
                return lambda: _packed(seq, store.drop_channel(channel))
            case ["truncate", str(channel), bytes(id)]:
                return lambda: _packed(seq, store.truncate(channel, id))
            case ["hold", str(channel), str(holder), bytes() | None as id]:
                return lambda: _packed(seq, store.hold(channel, holder, id))
            case _:
                return None

    async def _describe(self, channel: str) -> object:
        info = await self._store.describe(channel)
        return [encode_policy(info.policy), info.first_id, info.latest_id]

    def _fixed(self, channel: str, start: list[object]) -> list[object]:
        """`start` with "latest" fixed as the request arrives: appends behind it on the connection are to be read."""
        return ["next", encode_id(self._store.find(channel).visible_to + 1)] if start == ["latest"] else start

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def _read(
        self,
        connection: Connection,
        seq: int,
        channel: str,
        start: list[object],
        upto: bytes | None,
        wait_s: float,
    ) -> list[Payload]:
        reader = self._reader(connection, channel, start)
        entries = await self._collect(connection, reader)
        if not entries and wait_s > 0:
            await _waited(reader, wait_s)
            entries = await self._collect(connection, reader)
        rows, next_id = _cut(entries, upto, reader.next_id)
        if len(rows) == len(entries):
            connection.keep_reader(channel, reader)
        return encode_entries(seq, rows, encode_id(next_id), self._store.find(channel).latest_id)

    async def _read_filtered(
        self,
        connection: Connection,
        seq: int,
        channel: str,
        start: list[object],
        wait_s: float,
        passing: EntryFilter,
    ) -> list[Payload]:
        """Answer `read` with what passes a filter, and with how far it has come in what does not."""
        reader = self._reader(connection, channel, start)
        if not await self._collect_filtered(connection, reader, passing) and wait_s > 0:
            await _waited(reader, wait_s)
            await self._collect_filtered(connection, reader, passing)
        entries = passing.taken()
        rows, next_id = _cut(entries, None, reader.next_id)
        if len(rows) == len(entries):
            connection.keep_reader(channel, reader)
        return encode_filtered(seq, rows, encode_id(next_id), self._store.find(channel).latest_id)

    async def _collect_filtered(self, connection: Connection, reader: Reader, passing: EntryFilter) -> int:
        """Filter the entries that there are, until there are as many as an answer takes, or `FILTERED_BYTES` were
        looked at: how many bytes."""
        size = 0
        async with connection.turn:
            await connection.room()
            while size < FILTERED_BYTES and passing.kept_bytes < ANSWER_BYTES // 2:
                try:
                    entries = await reader.poll()
                except TidewalError:
                    if not size:
                        raise
                    break  # the next request meets it again, when its reader has what comes before
                if not entries:
                    break
                size += sum([len(entry.payload) + ROW.size for entry in entries])
                await _filter(entries, passing)
        return size

    def _reader(self, connection: Connection, channel: str, start: list[object]) -> Reader:
        try:
            where = decode_start(start)
        except ValueError:
            raise InvalidRequest("the request names no start that the protocol knows") from None
        kept = connection.readers.pop((channel, where), None) if isinstance(where, int) else None
        return kept or Reader(self._store, channel, where)

    async def _collect(self, connection: Connection, reader: Reader) -> Sequence[Entry]:
        """The entries that there are, about as many as an answer takes."""
        async with connection.turn:
            await connection.room()
            entries = await reader.poll()
            size = sum([len(entry.payload) for entry in entries])
            while entries and size < ANSWER_BYTES // 2:
                try:
                    more = await reader.poll()
                except TidewalError:  # the next request meets it again, when its reader has what comes before
                    break
                if not more:
                    break
                entries = [*entries, *more]
                size += sum([len(entry.payload) for entry in more])
            return entries


async def _filter(entries: Sequence[Entry], passing: EntryFilter) -> None:
    """Add the entries to what passes; other connections have their turn every `FILTERING_S`, and at the end."""
    until = monotonic() + FILTERING_S
    for _ in passing.added(entries):
        if monotonic() >= until:
            await asyncio.sleep(0)
            until = monotonic() + FILTERING_S
    await asyncio.sleep(0)


async def _waited(reader: Reader, wait_s: float) -> None:
    """Return when there may be more to poll, after `wait_s` seconds at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(wait_s, WAIT_LIMIT_S)):
            await reader.wait()


def _is_request(message: Any) -> bool:
    """Whether the message is a request: by types, because patterns take longer than the rest of a small append."""
    if type(message) is not list:
        return False
    items = cast("list[Any]", message)
    return len(items) >= 2 and type(items[0]) is int and items[0] >= 0 and type(items[1]) is str


async def _packed(seq: int, work: Coroutine[object, object, object]) -> list[Payload]:
    return encode([seq, "ok", await work])


def _with_entries(arguments: list[object], frame: ProtocolFrame) -> list[object]:
    """The arguments with the entries of the frame in place of their channels."""
    if not len(frame.rows):
        if len(frame.payloads):
            raise InvalidRequest("the request has payloads without rows")
        return arguments
    names = arguments[-1] if arguments else None
    if not isinstance(names, list) or set(map(type, cast("list[object]", names))) != {str}:
        raise InvalidRequest("the request has entries, but no list of channels")
    return [*arguments[:-1], appends_in(frame, cast("list[str]", names))]


def _seq(arguments: list[object]) -> int:
    match arguments:
        case [int(seq)]:
            return seq
        case _:
            raise _unfit("cancel")


def _policy(fields: dict[str, Any]) -> ChannelPolicy:
    """The policy of a request. Raises `InvalidRequest` for fields that are none."""
    try:
        policy = decode_policy(fields)
    except (ValueError, TypeError):
        raise InvalidRequest("the request names no policy that this owner knows") from None
    numbers = (policy.max_message_bytes, policy.ephemeral_bytes, policy.retention_bytes or 0)
    seconds = cast(object, policy.retention_s or 0.0)
    if not (
        type(policy.ephemeral) is bool
        and type(policy.temporary) is bool
        and policy.ephemeral >= policy.temporary
        and all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
        and isinstance(seconds, int | float)
        and seconds >= 0
    ):
        raise InvalidRequest("a number of the policy is none, or negative")
    return policy


def _cut(entries: Sequence[Entry], upto: bytes | None, next_id: int) -> tuple[Sequence[Entry], int]:
    """As many entries as an answer takes, and the id to go on with."""
    size = 0
    for count, entry in enumerate(entries):
        size += len(entry.payload)
        if (count and size > ANSWER_BYTES) or (upto is not None and entry.id > upto):
            return entries[:count], int.from_bytes(entry.id, "big")
    return entries, next_id


def _unfit(method: str) -> InvalidRequest:
    return InvalidRequest(f"{method[:100]!r} with these arguments is no request of the protocol")
