"""Requests and replies as messages: roles send each other requests through ephemeral channels of the WAL, never
directly.

Such a channel may lose, delay or duplicate a message. An `RpcClient` therefore repeats a request under the same number
until the reply is there or the deadline has passed; an `RpcServer` recognises the repetition, does not do the work
twice while it remembers, and repeats the reply. A server reads the requests that are sent after it was opened: a
request that a role served in an earlier incarnation is never served again, and a client that still waits repeats its
request. What is larger than a message may be travels in fragments.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import msgpack

from .channel_reader import OnBadRecord
from .errors import (
    BadRecord,
    ChannelNotFound,
    Closed,
    DeadlineExceeded,
    InvalidRequest,
    TidewalError,
    from_wire,
    of_unknown_outcome,
    to_wire,
)
from .fragments import FragmentAssembler, fragments_of
from .names import Names
from .record import DECODE_ERRORS, Record, RecordType, decode, encode
from .wal import Append, ChannelPolicy, Entry, From, FromId, Payload, Start, Wal

DEADLINE_S = 10.0
FIRST_RETRY_S = 0.25
RETRY_S_MAX = 2.0
REMEMBERED_REPLIES = 16_384
REMEMBERED_BYTES = 16 * 1024 * 1024  # of all replies that are remembered
REMEMBERED_REPLY_BYTES = 16 * 1024  # larger replies come from reads, which can be done again
MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # of all its fragments
SIGN_OF_LIFE_S = 3600.0  # between two small entries that a client writes into its own reply channel, see `RpcClient`

REQUEST_CHANNEL = ChannelPolicy(ephemeral=True, max_message_bytes=MESSAGE_BYTES_MAX, ephemeral_bytes=MESSAGE_BYTES_MAX)

REPLY_CHANNEL = replace(REQUEST_CHANNEL, temporary=True)

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply: named values, and a body for large data."""

    values: Params
    body: memoryview


@dataclass(slots=True)
class Request:
    """A request of a client. Answer it once, with `reply` or `fail`, or `ignore` it."""

    client: str
    number: int
    method: str
    params: Params
    body: memoryview
    _server: RpcServer = field(repr=False)

    def reply(self, values: Params | None = None, body: Payload = b"") -> None:
        """Send the reply: `values` that msgpack can encode, and `body`."""
        self._server.answer(self, {"ok": True, **(values or {})}, body)

    def fail(self, error: BaseException) -> None:
        """Send `error` instead; the client raises it."""
        self._server.answer(self, {"ok": False, **to_wire(error)}, b"")

    def ignore(self) -> None:
        """Do not answer: that is for another server of the role, on another node."""
        self._server.forget(self)


@dataclass(frozen=True, slots=True)
class RequestPack:
    """Requests that arrived together."""

    requests: list[Request]


class RpcServer:
    """An async iterator over the requests to `role`, in packs."""

    def __init__(self, wal: Wal, role: str, names: Names, *, on_bad: OnBadRecord | None = None) -> None:
        """`on_bad` gets entries that are no requests and cannot be answered."""
        self._wal = wal
        self._on_bad = on_bad
        self._channel = names.requests(role)
        self._names = names
        self._start: Start = From.LATEST
        self._working: set[tuple[str, int]] = set()
        self._answers: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._answers_bytes = 0
        self._fragments = FragmentAssembler(2 * MESSAGE_BYTES_MAX)
        self._limit = REQUEST_CHANNEL.max_message_bytes

    async def open(self) -> None:
        """Create the channel; requests sent from now on are read."""
        await self._wal.create_channel(self._channel, REQUEST_CHANNEL)
        self._limit = (await self._wal.describe(self._channel)).max_message_bytes
        latest = await self._wal.latest_id(self._channel)
        self._start = From.EARLIEST if latest is None else FromId(latest)

    async def __aiter__(self) -> AsyncIterator[RequestPack]:
        async for entries in self._wal.read(self._channel, self._start):
            requests = [request for entry in entries if (request := self._take(entry)) is not None]
            if requests:
                yield RequestPack(requests)

    def _take(self, entry: Entry) -> Request | None:
        """The request in `entry`, unless it was seen before: one that was answered gets its answer again, one that is
        being served is left."""
        try:
            record = self._fragments.take(decode(entry.payload))
            if record is None:
                return None
            if record.type is not RecordType.REQUEST:
                raise BadRecord(f"a record of type {record.type.name} among requests", reason="type")
            params = _unpack(record.key)
        except BadRecord as error:  # the client's deadline ends its call
            if self._on_bad is not None:
                self._on_bad(self._channel, entry, error)
            return None
        known = (record.producer, record.pseq)
        if known in self._working:
            return None
        answer = self._answers.get(known)
        if answer is not None:
            self._send(*known, [answer])
            return None
        self._working.add(known)
        return Request(*known, str(params.pop("method", "")), params, memoryview(record.body), self)

    def forget(self, request: Request) -> None:
        """Treat a repetition of `request` as new."""
        self._working.discard((request.client, request.number))

    def answer(self, request: Request, values: Params, body: Payload) -> None:
        """Send the reply to `request`, and remember it if it is small."""
        known = (request.client, request.number)
        record = Record(RecordType.REPLY, producer=request.client, pseq=request.number, key=_pack(values), body=body)
        self._working.discard(known)
        try:
            payloads = fragments_of(record, self._limit, MESSAGE_BYTES_MAX)
        except TidewalError as error:
            payloads = [_refusal(request.client, request.number, error)]
        if len(payloads) == 1 and len(payloads[0]) <= REMEMBERED_REPLY_BYTES:
            self._remember(known, payloads[0])
        self._send(*known, payloads)

    def _remember(self, known: tuple[str, int], payload: bytes) -> None:
        self._answers[known] = payload
        self._answers_bytes += len(payload)
        while len(self._answers) > REMEMBERED_REPLIES or self._answers_bytes > REMEMBERED_BYTES:
            self._answers_bytes -= len(self._answers.popitem(last=False)[1])

    def _send(self, client: str, number: int, payloads: Sequence[bytes]) -> None:
        channel = self._names.replies(client)
        try:
            self._wal.submit([Append(channel, payload) for payload in payloads], partial(self._sent, client, number))
        except TidewalError as error:
            self._sent(client, number, error)

    def _sent(self, client: str, number: int, result: list[bytes] | TidewalError) -> None:
        """Where the log refuses a reply, send that error, marked that the request was served all the same. Called by
        the log, on any thread."""
        if isinstance(result, TidewalError) and not isinstance(result, (ChannelNotFound, Closed)):
            with contextlib.suppress(TidewalError):  # then the client's deadline ends its call
                refusal = _refusal(client, number, of_unknown_outcome(result))
                self._wal.submit([Append(self._names.replies(client), refusal)], _ignore)


def _refusal(client: str, number: int, error: TidewalError) -> bytes:
    return encode(Record(RecordType.REPLY, producer=client, pseq=number, key=_pack({"ok": False, **to_wire(error)})))


class RpcClient:
    """Sends requests to roles and waits for the replies. One per client or role; many calls at once are fine.

    `name` must never have been used before: replies are recognised by it. With `shared` several clients may have it,
    also one after the other: each numbers its calls from a random number on and skips the replies to others, and none
    removes the reply channel. That is for processes that come and go without end, or are killed. `first_retry_s` is the
    time in seconds after which a request is first repeated.

    Where the log does not notice that a process is gone (`capabilities.drops_temporary`), the leader drops the reply
    channels that stay silent for hours. So the client writes a sign of life into its own every `SIGN_OF_LIFE_S`
    seconds; it creates the channel again where it was dropped all the same, as after a suspension.
    """

    def __init__(
        self, wal: Wal, names: Names, *, name: str = "", first_retry_s: float = FIRST_RETRY_S, shared: bool = False
    ) -> None:
        self.name = name or f"client-{secrets.token_hex(8)}"
        self._wal = wal
        self._names = names
        self._first_retry_s = first_retry_s
        self._shared = shared
        self._numbers = itertools.count(secrets.randbits(62) if shared else 1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._sign_of_life: asyncio.TimerHandle | None = None
        self._start: Start = From.EARLIEST
        self._fragments = FragmentAssembler(2 * MESSAGE_BYTES_MAX)
        self._limit = REQUEST_CHANNEL.max_message_bytes

    async def open(self) -> None:
        """Create the reply channel and listen to it."""
        await self._begin()
        self._reader = asyncio.create_task(self._listen(), name=f"replies of {self.name}")
        if not self._wal.capabilities.drops_temporary:
            self._sign_of_life = asyncio.get_running_loop().call_later(SIGN_OF_LIFE_S, self._show_life)

    def _show_life(self) -> None:
        """Write a sign of life, and schedule the next, which makes up for one that the log refuses."""
        if not self.listening:
            return
        with contextlib.suppress(TidewalError):
            self._wal.submit([Append(self._names.replies(self.name), _SIGN_OF_LIFE)], _ignore)
        self._sign_of_life = asyncio.get_running_loop().call_later(SIGN_OF_LIFE_S, self._show_life)

    async def _begin(self) -> None:
        channel = self._names.replies(self.name)
        await self._wal.create_channel(channel, REQUEST_CHANNEL if self._shared else REPLY_CHANNEL)
        self._limit = (await self._wal.describe(channel)).max_message_bytes
        latest = await self._wal.latest_id(channel)
        self._start = From.EARLIEST if latest is None else FromId(latest)

    @property
    def listening(self) -> bool:
        """Whether replies arrive: not after `close`, nor after the log has failed. Open another client then."""
        return self._reader is not None and not self._reader.done()

    async def call(
        self,
        role: str,
        method: str,
        params: Params | None = None,
        body: Payload = b"",
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Reply:
        """Call `method` of `role`, with `params` that msgpack can encode and `body`. Raises the error it replies with,
        `DeadlineExceeded` when no reply came within `deadline_s` seconds, `Closed` when this client was closed,
        `MessageTooLarge` (over `MESSAGE_BYTES_MAX`), `InvalidRequest` for a parameter that cannot be sent.

        An error has the field `outcome_unknown` where the request may have been served all the same: when it was sent
        more than once, an earlier incarnation of the role may have served it, and the next one refuse the repetition.
        """
        if self._reader is None:
            raise Closed(f"{self.name} is not open")
        number = next(self._numbers)
        key = _packed({"method": method, **(params or {})})
        record = Record(RecordType.REQUEST, producer=self.name, pseq=number, key=key, body=body)
        channel = self._names.requests(role)
        appends = [Append(channel, payload) for payload in fragments_of(record, self._limit, MESSAGE_BYTES_MAX)]
        loop = asyncio.get_running_loop()
        future = self._waiting[number] = loop.create_future()
        sending = _Sending(loop, self._wal, appends, self._first_retry_s, future)
        try:
            sending.send()
            async with asyncio.timeout(deadline_s):
                return await future
        except TidewalError as error:
            if sending.times > 1:
                raise of_unknown_outcome(error) from None
            raise
        except TimeoutError:
            raise DeadlineExceeded(f"{role} did not answer {method} within {deadline_s:g} s", role=role) from None
        finally:
            sending.stop()
            self._waiting.pop(number, None)
            if future.done() and not future.cancelled():
                future.exception()  # a call that was cancelled meanwhile does not retrieve it

    async def _listen(self) -> None:
        try:
            await self._read()
        except TidewalError as error:
            self._fail(of_unknown_outcome(error))
        else:
            self._fail(Closed("the log was closed", outcome_unknown=True))

    async def _read(self) -> None:
        while True:
            try:
                async for entries in self._wal.read(self._names.replies(self.name), self._start):
                    for entry in entries:
                        self._take(entry.payload)
                return
            except ChannelNotFound:  # the log took this process for gone, or has another owner; requests are repeated
                await self._begin_again()

    async def _begin_again(self) -> None:
        """Create the reply channel anew, also where the log refuses that for now: calls wait until their deadlines."""
        pause_s = self._first_retry_s
        while True:
            try:
                return await self._begin()
            except TidewalError as error:
                if not _is_transient(error):
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    def _take(self, payload: Payload) -> None:
        try:
            record = self._fragments.take(decode(payload))
            if record is None:
                return
            values = _unpack(record.key)
        except BadRecord:  # the same as a lost reply: the request is repeated
            return
        ours = record.type is RecordType.REPLY and record.producer == self.name
        if not ours or not isinstance(values.get("ok"), bool):
            return
        future = self._waiting.get(record.pseq)
        if future is None or future.done():
            return
        if values.pop("ok", False):
            future.set_result(Reply(values, memoryview(record.body)))
        else:
            future.set_exception(from_wire(values))

    def _fail(self, error: TidewalError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        """End all calls with `Closed` and drop the reply channel, unless it is shared. A second call does nothing."""
        reader, self._reader = self._reader, None
        if reader is None:
            return
        if self._sign_of_life is not None:
            self._sign_of_life.cancel()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        self._fail(Closed(f"{self.name} was closed", outcome_unknown=True))
        if self._shared:
            return
        try:
            await self._wal.drop_channel(self._names.replies(self.name))
        except Closed:
            return


class _Sending:
    """Sends one request again and again, slower each time, until stopped or until the log refuses it for good."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        wal: Wal,
        appends: Sequence[Append],
        interval_s: float,
        answer: asyncio.Future[Reply],
    ) -> None:
        self._loop = loop
        self._wal = wal
        self._appends = appends
        self._interval_s = interval_s
        self._answer = answer
        self._timer: asyncio.TimerHandle | None = None
        self.times = 0

    def send(self) -> None:
        self.times += 1
        try:
            self._wal.submit(self._appends, self._sent)
        except TidewalError as error:
            if not _is_transient(error):
                self._refuse(error)
                return
        self._timer = self._loop.call_later(self._interval_s, self.send)
        self._interval_s = min(self._interval_s * 2, RETRY_S_MAX)

    def _sent(self, result: list[bytes] | TidewalError) -> None:
        """Refuse at once what the log will never take; otherwise the reply, or its absence, says what became of the
        message. Called by the log, on any thread."""
        if isinstance(result, TidewalError) and not _is_transient(result):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks with it
                self._loop.call_soon_threadsafe(self._refuse, result)

    def _refuse(self, error: TidewalError) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _pack(values: Params) -> bytes:
    return cast(bytes, msgpack.packb(values))


def _packed(params: Params) -> bytes:
    """The parameters of a call. Raises `InvalidRequest` for one that cannot be encoded."""
    try:
        return _pack(params)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"a parameter cannot be sent: {error}") from None


def _unpack(data: bytes) -> dict[str, Any]:
    try:
        return dict(cast("dict[str, Any]", msgpack.unpackb(data, strict_map_key=False)))
    except DECODE_ERRORS as error:
        raise BadRecord(f"unreadable parameters: {error}", reason="key") from error


def _is_transient(error: TidewalError) -> bool:
    """Whether repeating may help: a role has not started yet, or the log refuses for now."""
    return error.retryable or isinstance(error, ChannelNotFound)


def _ignore(_: list[bytes] | TidewalError) -> None:
    """The reply, or its absence, says what became of a message in an ephemeral channel."""


_SIGN_OF_LIFE = encode(Record(RecordType.REPLY, key=_pack({})))  # a reply to no request: every client skips it
